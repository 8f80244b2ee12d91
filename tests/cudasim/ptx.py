"""PTX statements as Python functions.

A statement is translated once, instruction by instruction, by the rows of INSTRUCTIONS: an opcode's pattern and the
line of Python that it becomes. In a line, d0, d1... are the destinations and s0, s1... the sources; f16 registers hold
their 16 bits.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import access, warp
from .casts import HALVES, f32, f64, i32, to_bits, to_float, to_half, u16, u32, u64
from .threads import Machine, SharedArray

ACCESS = r"(?:\.(?:nc|cg|ca|relaxed|acquire|volatile|gpu|L1::no_allocate|L2::256B|L2::128B))*(?:\.v([24]))?\.(\w+)"
# opcode: Python; \1, \2 are the pattern's groups, D and S all destinations and sources. What is in braces is a
# function of access.py or warp.py, made for the width or type that follows.
INSTRUCTIONS: list[tuple[str, str]] = [
    (r"ld\.global" + ACCESS, "D = {load_global \\1 \\2}(s0)"),
    (r"st\.global" + ACCESS, "{store_global \\1 \\2}(S)"),
    (r"ld\.shared" + ACCESS, "D = {load_shared \\1 \\2}(s0)"),
    (r"st\.shared" + ACCESS, "{store_shared \\1 \\2}(S)"),
    (r"atom\.global\.inc\.u32", "d0 = count(s0, s1)"),
    (r"atom\.global\.add\.u32", "d0 = add(s0, s1)"),
    (r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)?", "copies[s2](s0, s1, *more)"),
    (r"cp\.async\.commit_group", "commit_copies()"),
    (r"cp\.async\.wait_group", "wait_copies(s0)"),
    (r"cp\.async\.wait_all", "wait_all_copies()"),
    (r"mov\.b32", "d0 = s0"),
    (r"cvt\.f32\.f16", "d0 = HALVES[s0]"),
    (r"cvt\.rn\.f16\.f32", "d0 = to_half(s0)"),
    (r"cvt\.rna\.tf32\.f32", "d0 = to_bits(s0) + 0x1000 & 0xFFFFE000"),
    (r"cvt\.u32\.u16", "d0 = s0"),
    (r"cvt\.u16\.u32", "d0 = s0 & 0xFFFF"),
    (r"prmt\.b32", "d0 = permute(s0, s1, s2)"),
    (r"lop3\.b32", "d0 = {logic}"),
    (r"shf\.r\.wrap\.b32", "d0 = (s1 << 32 | s0) >> (s2 & 31) & 0xFFFFFFFF"),
    (r"ex2\.approx\.ftz\.f32", "d0 = exp2(s0)"),
    (r"fence\.acq_rel\.gpu", "fence()"),
    (r"griddepcontrol\.wait", "wait()"),
    (r"griddepcontrol\.launch_dependents", "start_next()"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.(trans\.)?shared\.b16", "D = meet({ldmatrix \\1 \\2}, (s0,))"),
    (r"mma\.sync\.aligned\.m16n8k(?:16|8)\.row\.col\.f32\.(f16|tf32)\.\1\.f32", "D = meet({mma \\1}, (S))"),
]
LOGIC = (
    "a & b | c",
    "a & b & c",
    "a | b | c",
    "a ^ b ^ c",
    "a & b ^ c",
    "(a | b) & c",
    "(a ^ b) & c",
    "a & b | ~a & c",
)


def permute(a: int, b: int, selector: int) -> int:
    """prmt.b32: byte i of the result is byte (nibble i of the selector) of b:a, or its sign."""
    both, out = b << 32 | a, 0
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = both >> 8 * (pick & 7) & 255
        if pick & 8:
            byte = 255 * (byte >> 7)
        out |= byte << 8 * i
    return out


def logic(table: int) -> str:
    """The expression of a lop3 whose truth table this is: its value for a = F0, b = CC, c = AA."""
    for expression in LOGIC:
        if eval(expression, {"a": 0xF0, "b": 0xCC, "c": 0xAA}) & 0xFF == table:
            return "(" + re.sub(r"\b[abc]\b", lambda m: f"s{'abc'.index(m[0])}", expression) + ") & 0xFFFFFFFF"
    raise NotImplementedError(f"lop3 with table {table:#x}")


class Translator:
    """Makes Python functions of PTX statements, for a machine."""

    def __init__(self, machine: Machine) -> None:
        m = self.machine = machine
        self.made: dict[str, Any] = {}
        self.scope: dict[str, Any] = {
            "HALVES": HALVES, "to_half": to_half, "to_bits": to_bits, "to_float": to_float, "permute": permute,
            "exp2": np.exp2, "sqrt": np.sqrt, "one": f32(1), "f32": f32, "f64": f64, "i32": i32,
            "fence": m.fence, "wait": m.wait, "start_next": m.start_next, "meet": m.meet,
            "count": access.atomic(m, lambda x, n: 0 if x >= n else x + 1),
            "add": access.atomic(m, lambda x, n: x + n),
            "copies": {n: access.copy_async(m, n) for n in (4, 8, 16)},
            "commit_copies": partial(access.commit_copies, m), "wait_copies": partial(access.wait_copies, m),
            "wait_all_copies": partial(access.wait_all_copies, m),
        }  # fmt: skip

    def function(self, text: str, result: Any, *args: Any, ordered: bool = False) -> Callable[..., Any]:
        """The function of a statement; same parameters as `ptx` in cuda_ptx.py."""
        kind, count = result if isinstance(result, tuple) else (result, 1 if result else 0)
        types = [kind] * count + list(args)
        declared: dict[str, str] = {}
        lines = []
        for type, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]*);", text):
            declared |= {name.strip(): type for name in names.split(",")}
        body = re.sub(r"\.reg[^;]*;", "", text).strip()
        if declared:
            body = body.removeprefix("{").removesuffix("}")
        for instruction in filter(None, map(str.strip, body.split(";"))):
            try:
                lines.append(self.line(instruction, types, count, declared))
            except NotImplementedError as e:  # only a kernel that uses it fails
                lines.append(f"raise NotImplementedError({str(e)!r})")
        cuts = []
        for i, type in enumerate(args):
            if type is f32:
                cuts.append(f"if a{count + i}.__class__ is not f32: a{count + i} = f32(a{count + i})")
            elif type is f64:
                cuts.append(f"a{count + i} = f64(a{count + i})")
            elif type is i32:
                cuts.append(f"a{count + i} = i32(a{count + i})")
            else:
                cuts.append(f"a{count + i} &= {type(-1)}")
        names = ", ".join(f"a{count + i}" for i in range(len(args)))
        returned = ", ".join(f"a{i}" for i in range(count))
        loads = re.fullmatch(r"[a\d, ]+ = (load_\w+)\(a\d\)", "; ".join(lines))
        if loads:  # which cuts its address itself
            load: Callable[..., Any] = self.scope[loads[1]]
            return load
        code = "\n ".join([f"def op({names}):", *cuts, *lines, f"return {returned}"])
        exec(compile(code, text, "exec"), self.scope)
        op: Callable[..., Any] = self.scope["op"]
        return op

    def line(self, instruction: str, types: list[Any], count: int, declared: dict[str, str]) -> str:
        """The Python line of one instruction."""
        opcode, _, rest = instruction.partition(" ")
        parts = re.findall(r"\{[^}]*\}|[^,{}]+", rest)
        operands = [[o.strip(" []{}") for o in part.split(",")] for part in map(str.strip, parts) if part.strip()]
        matches = ((re.fullmatch(pattern, opcode), line) for pattern, line in INSTRUCTIONS)
        match, line = next(((m, line) for m, line in matches if m), (None, ""))
        if match is None:
            raise NotImplementedError(f"PTX instruction {opcode}: add it to INSTRUCTIONS in {Path(__file__).name}")
        line = match.expand(line) if "\\" in line else line

        def name(operand: str) -> str:
            if operand.startswith("$"):
                return f"a{operand[1:]}"
            return f"r_{operand}" if operand in declared else operand

        names = [[name(o) for o in group] for group in operands]
        if opcode == "mov.b32":
            return self.move(operands, names, types)
        writes = bool(re.search(r"\bd0|\bD\b", line))
        to, sources = (names[0], names[1:]) if writes else ([], names)
        flat = [s for group in sources for s in group]
        if "logic" in line:
            line = line.replace("{logic}", logic(int(flat[3], 0)))
        line = re.sub(r"\{(\w+)([^}]*)\}", lambda m: self.make(m[1], m[2].split(" ")[1:], opcode), line)
        line = re.sub(r"\bD\b", ", ".join(to), re.sub(r"\bS\b", ", ".join(flat), line))
        line = line.replace("*more", ", ".join(flat[3:])).replace(", )", ")")
        line = re.sub(r"\bs(\d)\b", lambda m: flat[int(m[1])], line)
        return re.sub(r"\bd(\d)\b", lambda m: to[int(m[1])], line)

    def make(self, what: str, how: list[str], opcode: str) -> str:
        """The name of a function made for an instruction."""
        key = f"{what}_" + re.sub(r"\W", "_", opcode)
        if key not in self.scope:
            if what == "ldmatrix":
                self.scope[key] = warp.ldmatrix(int(how[0]), bool(how[1]))
            elif what == "mma":
                self.scope[key] = warp.mma(*((16, True) if how[0] == "f16" else (8, False)))
            else:
                self.scope[key] = getattr(access, what)(self.machine, how[1], int(how[0] or 1))
        return key

    def move(self, operands: list[list[str]], names: list[list[str]], types: list[Any]) -> str:
        """mov.b32: between registers, from two halves or to two."""
        to, source = names
        if len(to) == 2:
            return f"{to[0]}, {to[1]} = {source[0]} & 0xFFFF, {source[0]} >> 16"
        if len(source) == 2:
            return f"{to[0]} = {source[0]} | {source[1]} << 16"
        floats = tuple(types[int(o[0][1:])] is f32 for o in operands)
        how = {(True, False): "to_float", (False, True): "to_bits"}.get(floats, "")
        return f"{to[0]} = {how}({source[0]})"


def module(machine: Machine, path: Path) -> SimpleNamespace:
    """Stand-in for cuda_ptx.py: its statements, read from it, as functions on the machine."""
    translator = Translator(machine)
    types = {"i32": i32, "u16": u16, "u32": u32, "u64": u64, "f32": f32, "f64": f64}
    scope: dict[str, Any] = {**types, "ptx": translator.function}
    for node in ast.parse(path.read_text()).body:
        made = "ptx" in {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        if made and isinstance(node, ast.Assign | ast.FunctionDef) and getattr(node, "name", "") != "ptx":
            code = compile(ast.Module([node], []), str(path), "exec", annotations.compiler_flag)
            exec(code, scope)

    def shared_address(array: SharedArray) -> int:
        return array.address

    scope["shared_address"] = shared_address
    return SimpleNamespace(**{name: value for name, value in scope.items() if name not in ("ptx", "__builtins__")})
