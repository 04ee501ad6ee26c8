"""What verbs orchestrate: from a command's variables to a plan, to who carries it out, and to a run that is followed or ended."""
