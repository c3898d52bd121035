"""Inline PTX of generated kernels as C++, so that the instructions themselves are tested without a GPU.

Only what the generator writes is understood: ``asm volatile(R"({..})" : outputs : inputs)`` around straight-line code.
"""

from __future__ import annotations

import re

_ASM = re.compile(r'asm volatile\(R"\((?P<text>.*?)\)"\s*:(?P<outputs>.*?)(?<!:):(?!:)(?P<inputs>.*?)\);', re.DOTALL)
_OPERAND = re.compile(r'"[+=]?([frh])"\(((?:[^()]|\([^()]*\))*)\)')
_REGISTERS = re.compile(r"\.reg \.(\w+) (.*)")
_TYPES = {"f32": "float", "b32": "uint32_t", "b16": "uint16_t"}
_LOAD = re.compile(r"ld(?:\.volatile)?\.shared\.(f32|b32) (\S+), \[(\S+?)(?:\+(\d+))?\]")
_SPLIT = re.compile(r"mov\.b32 \{(\w+), (\w+)\}, (\S+)")
_MOVE = re.compile(r"mov\.(?:b32|f32) (\S+), (\S+)")
# Instructions that are functions of ptx.h, under the same name with underscores.
_FUNCTIONS = {
    *("fma.rn.f32", "mul.rn.f32", "add.f32", "add.rn.f32", "cvt.f32.f16"),
    *("fma.rn.f16x2", "mul.rn.f16x2", "add.rn.f16x2", "prmt.b32"),
}


def translate_inline_ptx(source: str) -> str:
    """The source with every block of inline PTX replaced by C++ that needs ``ptx.h``."""
    translated = _ASM.sub(lambda match: _block(match["text"], match["outputs"] + "," + match["inputs"]), source)
    assert "asm" not in translated.split(), "PTX of a form that ptx_on_host.py does not know"
    return translated if translated == source else f'#include "ptx.h"\n{translated}'


def _block(text: str, operand_text: str) -> str:
    operands = [expression for _, expression in _OPERAND.findall(operand_text)]
    body = text.strip()
    assert body.startswith("{"), body[:80]
    assert body.endswith("}"), body[-80:]
    # A semicolon ends an instruction; the braces of {h0, h1} hold none.
    instructions = (part.strip() for part in body[1:-1].split(";"))
    return "{\n" + "\n".join(_instruction(i, operands) for i in instructions if i) + "\n}"


def _instruction(text: str, operands: list[str]) -> str:
    def value(name: str) -> str:
        if name.startswith("%"):
            return operands[int(name[1:])]
        if name.startswith("0f"):
            return f"cuda_on_host::FloatOf(0x{name[2:]}u)"
        return f"{name}u" if name.startswith("0x") else name

    if match := _REGISTERS.fullmatch(text):
        return f"[[maybe_unused]] {_TYPES[match[1]]} {', '.join(_names(match[2]))};"
    if match := _LOAD.fullmatch(text):
        kind, to, base, offset = match.groups()
        return f"{value(to)} = cuda_on_host::LoadShared<{_TYPES[kind]}>({value(base)} + {offset or 0}u);"
    if match := _SPLIT.fullmatch(text):
        low, high, pair = match.groups()
        return f"{low} = {value(pair)} & 0xFFFFu; {high} = {value(pair)} >> 16;"
    if match := _MOVE.fullmatch(text):
        return f"{value(match[1])} = {value(match[2])};"
    name, _, rest = text.partition(" ")
    assert name in _FUNCTIONS, f"ptx_on_host.py does not know {text!r}"
    to, *arguments = (value(part.strip()) for part in rest.split(","))
    return f"{to} = cuda_on_host::{name.replace('.', '_')}({', '.join(arguments)});"


def _names(declared: str) -> list[str]:
    """``w<2>, x`` declares w0, w1 and x."""
    names = []
    for part in declared.split(","):
        name, _, count = part.strip().rstrip(">").partition("<")
        names += [f"{name}{i}" for i in range(int(count))] if count else [name]
    return names or ["unused"]
