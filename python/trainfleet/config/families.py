"""Facts about the architectures behind `model.family`, for config, plan and data, which don't load them."""

from __future__ import annotations

from dataclasses import dataclass

MASKED = 0.15  # of a sequence's tokens are to be guessed (Devlin et al. 2018, arXiv:1810.04805, section 3.1)


@dataclass(frozen=True)
class Family:
    """`objective`: next (the next token), masked (hidden tokens), pairs (hidden tokens, and whether B follows A).

    `rotary`: positions are turned into the queries and keys; otherwise they are learnt, `positions_from` rows after the first.
    What distinguishes the decoders with rotary positions is data too: `biases` of query, key and value; norms of query and key
    by head, or of `all` heads together; `normed_after`: a block norms what its parts give, not what they take; `gains_from_one`:
    a norm's weight is what its gain has over 1; `scaled`: the embedding times the square root of its width; `gelu` in place of
    silu.
    """

    name: str
    objective: str
    rotary: bool = False
    positions_from: int = 0
    segments: int = 0
    dropout: float = 0.0
    norm_epsilon: float = 1e-5
    biases: bool = False
    normed: str = ""  # query and key: "", "head" or "all"
    normed_after: bool = False
    gains_from_one: bool = False
    scaled: bool = False
    gelu: bool = False

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.objective == "next"

    def guesses(self, sequence_length: int) -> int:
        """Tokens of a sequence that the loss is a mean over; the same for every sequence, so that means of means are exact."""
        return sequence_length if self.causal else max(1, round(MASKED * sequence_length))


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "next", rotary=True),
        Family("mistral", "next", rotary=True),  # Llama's, but for its window, beyond which no sequence may go here
        Family("qwen2", "next", rotary=True, norm_epsilon=1e-6, biases=True),  # arXiv:2412.15115
        Family("qwen3", "next", rotary=True, norm_epsilon=1e-6, normed="head"),  # arXiv:2505.09388
        Family("olmo2", "next", rotary=True, norm_epsilon=1e-6, normed="all", normed_after=True),  # arXiv:2501.00656
        Family("gemma", "next", rotary=True, norm_epsilon=1e-6, gains_from_one=True, scaled=True, gelu=True),  # arXiv:2403.08295
        Family("gpt2", "next", dropout=0.1),
        Family("bert", "pairs", segments=2, dropout=0.1, norm_epsilon=1e-12),
        # Position 0 has row 2: fairseq counts from the row after the padding token's, which is 1.
        Family("roberta", "masked", positions_from=2, segments=1, dropout=0.1),
    )
}
