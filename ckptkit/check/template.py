"""Chat templates: read as syntax trees, never rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..tokenizer.special import TRAINING
from .finding import Finding, finding

# names by which a template climbs from a value to the interpreter
HIDDEN = re.compile(r"__\w+__|\b(mro|func_globals|gi_frame|cr_frame|f_globals|tb_frame|subclasses)\b")
HELPERS = ("lipsum", "cycler", "joiner", "self")


def check(template: str, at: str = "key tokenizer.chat_template") -> Iterator[Finding]:
    """Code that climbs out of the template, files it asks for, and what does not parse."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    try:
        tree = environment.parse(TRAINING.sub("", template))
    except (TemplateError, RecursionError) as e:
        yield finding("template-syntax", at, f"the chat template does not parse: {e}",
                      "llama.cpp's server does not start with it; other engines chat with a template of their own",
                      "convert with --chat-template FILE")  # fmt: skip
        return
    reasons: dict[str, None] = {}
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Filter, nodes.Name)):
        if isinstance(node, nodes.Getattr) and (HIDDEN.fullmatch(node.attr) or node.attr.startswith("_")):
            reasons[f"attribute {node.attr}"] = None
        elif isinstance(node, nodes.Getitem):
            consts = [node.arg] if isinstance(node.arg, nodes.Const) else list(node.arg.find_all(nodes.Const))
            joined = "".join(str(c.value) for c in consts)
            if HIDDEN.search(joined):
                reasons[f"item {joined}"] = None
        elif isinstance(node, nodes.Filter) and node.name == "attr":
            reasons["filter attr"] = None
        elif isinstance(node, nodes.Name) and node.ctx == "load" and node.name in HELPERS:
            reasons[f"name {node.name}"] = None
    for asked in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        reasons[f"statement {type(asked).__name__.lower()}"] = None
    if reasons:
        yield finding("template-code", at, f"the chat template runs code: {', '.join(reasons)}",
                      "llama.cpp runs none of it; an engine that renders it outside a sandbox runs whatever it says",
                      "do not chat with it; convert with --remove tokenizer.chat_template")  # fmt: skip
