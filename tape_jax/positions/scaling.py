"""Scalings of rotary frequencies: how a model is stretched to positions it was not trained on.

Each is a pure function of the frequencies, the base and, where its source says so, the length of
the call. Letters: s factor, L original (training) length, N length of the call, F = D / 2
frequencies w_f.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from tape_jax.errors import check_choices


@dataclasses.dataclass(frozen=True)
class Scaling:
    """No scaling, and the base of all: a subclass sets `name` to its registry name."""

    name: str = dataclasses.field(default="none", kw_only=True)

    def validate(self) -> None:
        """Raises ValueError, naming field, value and fix."""
        check_choices(self, "position.scaling")

    def frequencies(self, freqs: np.ndarray, base: float, length: int) -> np.ndarray:
        """The scaled frequencies, (F,) radians per position, of a call of this length."""
        return freqs

    def magnitude(self, length: int) -> float:
        """What cos and sin are multiplied with."""
        return 1.0

    @property
    def by_length(self) -> bool:
        """Whether the length of the call changes anything."""
        return False


@dataclasses.dataclass(frozen=True)
class _Stretched(Scaling):
    """What every scaling with a factor shares.

    Attributes:
      factor: s >= 1, how many times longer the positions may be; has to be given.
    """

    factor: float = 0.0

    def validate(self):
        """Raises ValueError for a factor that was not given or is below 1."""
        super().validate()
        if not self.factor >= 1.0:
            raise ValueError(
                f"position.scaling.factor={self.factor} must be >= 1: scaling {self.name!r} needs"
                " it, and 1 changes nothing"
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling(_Stretched):
    """Position interpolation (arXiv 2306.15595): positions are divided by s."""

    name: str = dataclasses.field(default="linear", kw_only=True)

    def frequencies(self, freqs, base, length):
        """w / s."""
        return freqs / self.factor


def _ntk(freqs: np.ndarray, factor: float) -> np.ndarray:
    """Frequencies of the base s^(D / (D - 2)): the lowest is divided by s, the highest kept."""
    return freqs * factor ** (-np.arange(len(freqs)) / max(len(freqs) - 1, 1))


@dataclasses.dataclass(frozen=True)
class NTKScaling(_Stretched):
    """NTK-aware: the base becomes base s^(D / (D - 2)) (bloc97; arXiv 2309.00071, section 3.1)."""

    name: str = dataclasses.field(default="ntk", kw_only=True)

    def frequencies(self, freqs, base, length):
        """w_f s^(-f / (F - 1))."""
        return _ntk(freqs, self.factor)


@dataclasses.dataclass(frozen=True)
class _Extended(_Stretched):
    """What every scaling that knows the training length shares.

    Attributes:
      original: L, the length the model was trained at; has to be given.
    """

    original: int = 0

    def validate(self):
        """Raises ValueError for a length that was not given or is below 1."""
        super().validate()
        if self.original < 1:
            raise ValueError(
                f"position.scaling.original={self.original} must be >= 1: scaling {self.name!r}"
                " needs the length the model was trained at"
            )


@dataclasses.dataclass(frozen=True)
class DynamicNTKScaling(_Extended):
    """Dynamic NTK (emozilla; transformers' "dynamic"): beyond L, NTK-aware with s N / L - (s - 1).

    A function of the length of the call and of nothing before it. Not causal in the strict sense:
    tokens see how long their sequence is, so a cache of keys is not exact.
    """

    name: str = dataclasses.field(default="dynamic", kw_only=True)

    @property
    def by_length(self):
        """It does."""
        return True

    def frequencies(self, freqs, base, length):
        """Those of the original length up to it, then by the length."""
        if length <= self.original:
            return freqs
        return _ntk(freqs, self.factor * length / self.original - (self.factor - 1))


@dataclasses.dataclass(frozen=True)
class YarnScaling(_Extended):
    """YaRN (arXiv 2309.00071): slow frequencies are divided by s, fast ones kept, a ramp between.

    Attributes:
      beta_fast, beta_slow: rotations within L above which a frequency is kept, and below which it
        is divided by s.
      attention_factor: what cos and sin are multiplied with; 0.1 ln s + 1 when None.
      ramp: linear in the index of the frequency between the rounded indices that make those
        rotations ("index": the code of YaRN, and transformers), or in the rotations ("rotations":
        the paper's equation 17).
    """

    name: str = dataclasses.field(default="yarn", kw_only=True)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    ramp: Literal["index", "rotations"] = "index"

    def validate(self):
        """Raises ValueError for rotations that are no interval."""
        super().validate()
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"position.scaling.beta_slow={self.beta_slow} must lie in (0, beta_fast="
                f"{self.beta_fast})"
            )

    def frequencies(self, freqs, base, length):
        """w (kept + (1 - kept) / s)."""
        return self._blend(freqs, base, self.factor)

    def magnitude(self, length):
        """0.1 ln s + 1, or the attention factor."""
        return self._temperature(self.factor)

    def _temperature(self, factor):
        return self.attention_factor or 0.1 * math.log(factor) + 1.0

    def _blend(self, freqs, base, factor):
        ramp = {"index": self._kept_by_index, "rotations": self._kept_by_rotations}[self.ramp]
        kept = ramp(freqs, base)
        return freqs * (kept + (1 - kept) / factor)

    def _kept_by_rotations(self, freqs, base):
        rotations = self.original * freqs / (2 * np.pi)
        return np.clip((rotations - self.beta_slow) / (self.beta_fast - self.beta_slow), 0, 1)

    def _kept_by_index(self, freqs, base):
        count = len(freqs)

        def index(rotations):
            return count * math.log(self.original / (rotations * 2 * np.pi)) / math.log(base)

        low = max(math.floor(index(self.beta_fast)), 0)
        high = min(math.ceil(index(self.beta_slow)), 2 * count - 1)
        high = high + 0.001 if high == low else high
        return 1 - np.clip((np.arange(count) - low) / (high - low), 0, 1)


@dataclasses.dataclass(frozen=True)
class DynamicYarnScaling(YarnScaling):
    """YaRN with the factor N / L once a call is longer than L: the official start of TAPE + YaRN.

    models/llama/adayarn.py, as a function of the length alone: up to L the frequencies stay and cos
    and sin are multiplied with the temperature of `factor`; beyond, both follow N / L. (The
    official one scales the first long call only: docs/faithfulness.md.)
    """

    name: str = dataclasses.field(default="dynamic-yarn", kw_only=True)
    ramp: Literal["index", "rotations"] = "rotations"

    @property
    def by_length(self):
        """It does."""
        return True

    def frequencies(self, freqs, base, length):
        """Those of the original length up to it, then YaRN's of N / L."""
        if length <= self.original:
            return freqs
        return self._blend(freqs, base, length / self.original)

    def magnitude(self, length):
        """The temperature of s up to L, then that of N / L."""
        longer = length > self.original
        return self._temperature(length / self.original if longer else self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(_Extended):
    """Llama 3.1: waves longer than L / low are slowed by s, those shorter than L / high kept.

    Attributes:
      low, high: rotations within L at the ends of the blend.
    """

    name: str = dataclasses.field(default="llama3", kw_only=True)
    low: float = 1.0
    high: float = 4.0

    def validate(self):
        """Raises ValueError for rotations that are no interval."""
        super().validate()
        if not 0 < self.low < self.high:
            raise ValueError(f"position.scaling.low={self.low} must lie in (0, high={self.high})")

    def frequencies(self, freqs, base, length):
        """(1 - u) w / s + u w with u = (L / wavelength - low) / (high - low) within [0, 1]."""
        rotations = self.original * freqs / (2 * np.pi)
        kept = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
        return freqs * (kept + (1 - kept) / self.factor)


SCALINGS: dict[str, type[Scaling]] = {
    "none": Scaling,
    "linear": LinearScaling,
    "ntk": NTKScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YarnScaling,
    "dynamic-yarn": DynamicYarnScaling,
    "llama3": Llama3Scaling,
}
"""Scalings by name; raising `position.base` ("theta scaling") needs none of them."""
