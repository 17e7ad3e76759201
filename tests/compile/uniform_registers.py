"""Machine code that reads a uniform register which some path to it has not written: a fault of the assembler, whatever the kernel says.

The ptxas of triton 3.6 makes it: two matrix descriptors of one shared-memory address with different swizzles, and the copy of the address
for the second is lost. The tensor core then reads wherever the register pointed before: wrong values, or an illegal access.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

ALL = frozenset(range(64))  # UR63 is URZ
LABEL = re.compile(r"(\.L_x_\d+|\$[\w$]+):")
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z0-9][\w.]*)\s*(.*?)\s*;")
SOURCES_ONLY = re.compile(r"NANOSLEEP|BAR|WARPSYNC|USETMAXREG|BR|\w*SETP")


class Instruction(NamedTuple):
    address: str
    guard: str | None
    opcode: str
    operands: list[str]

    @property
    def jump(self) -> str | None:
        """Label that a branch may go to."""
        found = re.fullmatch(r"`\((.+)\)", self.operands[-1]) if self.opcode.startswith("BRA") else None
        return found[1] if found else None

    @property
    def copies(self) -> bool:
        """Whether it only copies one register to another: of the halves of an address, ptxas may copy one before it is made, and make it then."""
        return self.guard is None and self.opcode == "UMOV"

    @property
    def ends(self) -> bool:
        """Whether the next instruction is never reached from here."""
        return self.guard is None and (self.opcode.startswith(("EXIT", "RET")) or (self.opcode.startswith("BRA") and len(self.operands) == 1))

    def registers(self) -> tuple[set[int], set[int]]:
        """Uniform registers that are read, and written: the first operand after predicates is the destination."""
        operands, written = self.operands, set()
        if not SOURCES_ONLY.match(self.opcode):
            at = next((i for i, operand in enumerate(operands) if not re.fullmatch(r"U?PT?\d*", operand)), 0)
            if operands and (found := re.fullmatch(r"UR(\d+)", operands[at])):
                count = 2 if re.search(r"\.64\b|\.WIDE", self.opcode) and "SHF" not in self.opcode else 1
                written = set(range(int(found[1]), int(found[1]) + count))
                operands = operands[:at] + operands[at + 1 :]
        return {n for i, operand in enumerate(operands) for n in self._read(operand, i)}, written

    def _read(self, operand: str, i: int) -> Iterator[int]:
        if found := re.search(r"gdesc\[UR(\d+)\]", operand):  # descriptors of A and B, or of B behind an A in registers
            first = int(found[1])
            yield from range(first + (2 if i > 1 else 0), first + 4)
            return
        for number, bracket, pair in re.findall(r"UR(\d+)(\]?)((?:\.64)?)", operand):
            wide = pair or self.opcode.startswith("UIADD3.64") or (bracket and f"desc[UR{number}]" in operand)
            yield from range(int(number), int(number) + (2 if wide else 1))


def read_before_written(disassembly: str) -> list[str]:
    """Such instructions of one kernel, but for copies: a copy is as little written as what it copies. ``disassembly``: the output of ``nvdisasm -c``."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append(Instruction(found[1], found[2], found[3], [part.strip() for part in found[4].split(",")] if found[4] else []))
    assert code, "no machine code"
    written_at: dict[int, frozenset[int]] = {}
    # functions, whose callers are not followed, are entered with all of them
    todo = [(0, frozenset({63})), *((at, ALL) for label, at in labels.items() if label.startswith("$"))]
    while todo:
        at, written = todo.pop()
        while at < len(code):
            if at in written_at:
                if written_at[at] <= written:
                    break
                written &= written_at[at]
            written_at[at] = written
            read, made = code[at].registers()
            written = written - made if code[at].copies and not read <= written else written | made
            if jump := code[at].jump:
                todo.append((labels[jump], written))
            if code[at].ends:
                break
            at += 1
    faults = []
    for at, written in sorted(written_at.items()):
        missing = code[at].registers()[0] - written
        if missing and not code[at].copies:
            names = ", ".join(f"UR{n}" for n in sorted(missing))
            faults.append(f"/*{code[at].address}*/ {code[at].opcode} {', '.join(code[at].operands)} reads {names}")
    return faults
