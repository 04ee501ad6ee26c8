"""Token healing: a prompt may end in the middle of a token as the training text has them.

`def ` is "def" and " ", but after "def" the training text has " name" in one token, and never " " by itself: the model has never
seen such a blank. So the end of the prompt is removed as far as a longer token can begin with it, and the model generates it
again from tokens that start with the removed text: what guidance and transformers call token healing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from torch import Tensor, tensor

from ..data.tokenizer import StreamDecoder, Tokenizer


class Healing:
    """A prompt split in two: `kept`, the tokens that the model gets; `owed`, the text that its next tokens must spell."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], heals: bool = True) -> None:
        """`prompt` must be of this tokenizer; what it spells is shown as it was, whatever is taken back.

        Unless it `heals`, nothing is.
        """
        self.tokenizer, self.prompt = tokenizer, prompt
        self.ids = tokenizer.spellings
        self.spelled = {id_: spelling for spelling, id_ in self.ids.items()}
        self.sorted = sorted(self.ids)
        taken, self.owed = self._reach() if heals else (0, "")
        self.kept = prompt[: len(prompt) - taken]

    def _reach(self) -> tuple[int, str]:
        """How many of the prompt's last tokens can be removed at most, and what they spell."""
        taken, owed, tail, longest = 0, "", "", max(map(len, self.sorted), default=0)
        for count, id_ in enumerate(reversed(self.prompt), start=1):
            tail = self.spelled.get(id_, "") + tail
            if id_ not in self.spelled or len(tail) >= longest:
                break
            if next(self._longer(tail), None):
                taken, owed = count, tail
        return taken, owed

    def _longer(self, beginning: str) -> Iterator[str]:
        """The spellings that begin so and go on."""
        for spelling in self.sorted[bisect_right(self.sorted, beginning) :]:
            if not spelling.startswith(beginning):
                return
            yield spelling

    def choices(self, vocabulary: int) -> Tensor | None:
        """The ids below `vocabulary` that agree with what is owed; None when nothing is."""
        if not self.owed:
            return None
        parts = (self.owed[:end] for end in range(1, len(self.owed) + 1))
        spellings = [*filter(self.ids.__contains__, parts), *self._longer(self.owed)]
        return tensor([id_ for id_ in map(self.ids.__getitem__, spellings) if id_ < vocabulary])

    def written(self, id_: int) -> None:
        """Registers a generated token."""
        self.owed = self.owed[len(self.spelled[id_]) :] if self.owed else ""

    def beyond(self, made: Iterable[int]) -> Iterator[str]:
        """The generated text after the prompt, as its tokens come."""
        decoder, known = StreamDecoder(self.tokenizer), len(self.tokenizer.decode(self.prompt))
        for tokens in (self.kept, made):
            for id_ in tokens:
                text = decoder.push(id_)
                yield text[known:]
                known -= min(known, len(text))
