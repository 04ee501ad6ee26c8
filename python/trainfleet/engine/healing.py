"""Token healing: a prompt may end in the middle of a token as the training text has them.

`def ` is "def" and " ", but after "def" the training text has " name" in one token, and never " " by itself: a model that is
given the blank has seen nothing like it. So the end of the prompt is taken back as far as one longer token can begin with it, and
the model writes it again, in tokens that agree with it: what guidance and transformers call token healing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from torch import Tensor, tensor

from ..data.tokenizer import StreamDecoder, Tokenizer


class Healing:
    """A prompt as a model is given it: `kept`, its tokens without the last ones; `owed`, what the next ones must write again."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        """`prompt` must be of this tokenizer; what it spells is shown as it was, whatever is taken back."""
        self.tokenizer, self.prompt = tokenizer, prompt
        self.ids = tokenizer.spellings
        self.spelled = {id: spelling for spelling, id in self.ids.items()}
        self.sorted = sorted(self.ids)
        taken, self.owed = self._reach()
        self.kept = prompt[: len(prompt) - taken]

    def _reach(self) -> tuple[int, str]:
        """How many last tokens of the prompt can be taken back at most, and what they spell."""
        taken, owed, tail, longest = 0, "", "", max(map(len, self.sorted), default=0)
        for count, id in enumerate(reversed(self.prompt), start=1):
            tail = self.spelled.get(id, "") + tail
            if id not in self.spelled or len(tail) >= longest:
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
        return tensor([id for id in map(self.ids.__getitem__, spellings) if id < vocabulary])

    def written(self, id: int) -> None:
        """Takes note of a token that came."""
        self.owed = self.owed[len(self.spelled[id]) :] if self.owed else ""

    def beyond(self, made: Iterable[int]) -> Iterator[str]:
        """The text that comes after the prompt, as its tokens come."""
        decoder, known = StreamDecoder(self.tokenizer), len(self.tokenizer.decode(self.prompt))
        for tokens in (self.kept, made):
            for id in tokens:
                text = decoder.push(id)
                yield text[known:]
                known -= min(known, len(text))
