"""Coverage-guided fuzzing of all that reads text or files of strangers: `targets` are what is fuzzed, `guided` runs atheris."""
