"""Reads a pickle as data: nothing that it names is imported, and nothing in it is called.

A pickle is a program for a small machine, two of whose instructions find and call any function of this interpreter. Here they act
on plain values only: a class or function that the pickle names stays a `Name`, and an object that it would make stays a `Made`.
So the worst that a hostile pickle can yield is false data, which the caller checks (index, archive). Instructions:
Lib/pickletools.py of CPython.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

STOP = ord(".")
ORDERED = "collections.OrderedDict"  # what nn.Module.state_dict gives: read as the dict that it is


class Name(str):
    """A class or function that a pickle names: `torch.Size`."""

    __slots__ = ()


class Made:
    """An object that a pickle would make by calling `of` with `arguments`, and then give `state`."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: Name, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None


def read(data: bytes) -> Any:
    """What a pickle holds: plain values, `Name`s and `Made`s. Its size bounds the time and memory that this takes.

    Raises:
        ValueError: it is cut off, or has an instruction that data needs none of.
    """
    machine = PickleState(data)
    try:
        while (instruction := machine.byte()) != STOP:
            STEPS[instruction](machine)
        return machine.stack.pop()
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"its pickle is damaged at byte {machine.at:,}") from error


class PickleState:
    """The state of a pickle that is being read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def take(self, size: int) -> bytes:
        """The next bytes; IndexError when there are not so many."""
        first, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise IndexError(size)
        return self.data[first : self.at]

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def text(self, size: int) -> None:
        """Pushes as many bytes as a number of `size` bytes says, as text."""
        self.stack.append(self.take(self.number(size)).decode("utf-8", "surrogatepass"))

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.marks.pop()
        return found

    def tuple_of(self, size: int) -> None:
        found = tuple(self.stack[-size:])
        if len(found) < size:
            raise IndexError(size)
        self.stack[-size:] = [found]

    def tuple_since_mark(self) -> None:
        found = tuple(self.since_mark())
        self.stack.append(found)

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target += values

    def set(self, pairs: list[Any]) -> None:
        """Keys are text, numbers or objects: a key of other values would be hashed through to its depths."""
        target = self.stack[-1]
        keys, values = pairs[::2], pairs[1::2]
        if type(target) is not dict or any(type(key) not in (str, int, Made) for key in keys):
            raise TypeError
        target.update(zip(keys, values, strict=True))

    def line_name(self) -> None:
        """A name as two lines of text, in older protocols."""
        end = self.data.index(b"\n", self.data.index(b"\n", self.at) + 1)
        module, name = self.take(end - self.at).decode().split("\n")
        self.at += 1
        self.stack.append(Name(f"{module}.{name}"))

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError
        self.stack.append(Name(f"{module}.{name}"))

    def make(self) -> None:
        arguments, of = self.stack.pop(), self.stack.pop()
        if type(of) is not Name or type(arguments) is not tuple:
            raise TypeError
        self.stack.append({} if of == ORDERED and not arguments else Made(of, arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is dict:
            return  # an OrderedDict's own attributes, such as the versions of modules: nothing that is asked for
        if type(target) is not Made:
            raise TypeError
        target.state = state

    def remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def pop_two(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]


def _float(machine: PickleState) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


# What pickle.dump and torch.save write of plain data, in protocols 2 to 5.
STEPS: dict[int, Callable[[PickleState], Any]] = {
    0x80: lambda machine: machine.take(1),  # protocol
    0x95: lambda machine: machine.take(8),  # frame
    ord("("): PickleState.mark,
    ord("N"): lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    ord("K"): lambda machine: machine.stack.append(machine.byte()),
    ord("M"): lambda machine: machine.stack.append(machine.number(2)),
    ord("J"): lambda machine: machine.stack.append(machine.number(4, True)),
    0x8A: lambda machine: machine.stack.append(machine.number(machine.byte(), True)),
    ord("G"): _float,
    0x8C: lambda machine: machine.text(1),
    ord("X"): lambda machine: machine.text(4),
    ord(")"): lambda machine: machine.stack.append(()),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("t"): PickleState.tuple_since_mark,
    ord("]"): lambda machine: machine.stack.append([]),
    ord("a"): lambda machine: machine.append([machine.stack.pop()]),
    ord("e"): lambda machine: machine.append(machine.since_mark()),
    ord("}"): lambda machine: machine.stack.append({}),
    ord("s"): lambda machine: machine.set(machine.pop_two()),
    ord("u"): lambda machine: machine.set(machine.since_mark()),
    0x94: lambda machine: machine.remember(len(machine.memo)),
    ord("q"): lambda machine: machine.remember(machine.byte()),
    ord("r"): lambda machine: machine.remember(machine.number(4)),
    ord("h"): lambda machine: machine.stack.append(machine.memo[machine.byte()]),
    ord("j"): lambda machine: machine.stack.append(machine.memo[machine.number(4)]),
    ord("c"): PickleState.line_name,
    0x93: PickleState.stack_name,
    ord("R"): PickleState.make,
    0x81: PickleState.make,
    ord("b"): PickleState.build,
    ord("Q"): lambda machine: machine.stack.append(Made(Name("persistent"), (machine.stack.pop(),))),
}
