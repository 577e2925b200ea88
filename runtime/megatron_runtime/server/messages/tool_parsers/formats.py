"""Formats of tool calls, by the names of vLLM's tool parsers."""

from __future__ import annotations

import random
import string
from dataclasses import replace
from functools import partial

from megatron_runtime.call_format import CallFormat, ParameterFormat
from megatron_runtime.server.messages.tool_parsers import harmony, hermes, llama3_json, mistral, pythonic, sectioned
from megatron_runtime.server.messages.tool_parsers.json_list import JsonListParser
from megatron_runtime.server.messages.tool_parsers.sectioned import SectionedParser
from megatron_runtime.server.messages.tool_parsers.tagged import TaggedParser, Tags
from megatron_runtime.server.messages.tool_parsers.tool_format import ToolFormat, begun


def _short_call_id() -> str:
    """Nine letters and digits: Mistral's templates reject other ids."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


HERMES = ToolFormat(
    "hermes",
    lambda _: hermes.HermesParser(),
    (hermes.BEGIN, hermes.END),
    (("<tool_call>",),),
    CallFormat(begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
)
_LLAMA3_JSON = ToolFormat(
    "llama3_json",
    lambda _: llama3_json.Llama3JsonParser(),
    (*llama3_json.TAGS, llama3_json.END),
    ((llama3_json.TAGS[0],), ('{"name": function name, "parameters": ',)),
    CallFormat(separator="; ", arguments="parameters", has_marker=False),
    unmarked=r"\{\s*" + begun('"name"', '"type"', '"parameters"'),
)
_MISTRAL = ToolFormat(
    "mistral",
    lambda _: mistral.MistralParser(),
    (mistral.MARKER, mistral.ARGUMENTS, mistral.CALL_ID),
    ((mistral.MARKER,),),
    CallFormat(opening=f"{mistral.MARKER}[", separator=", ", closing="]"),
    _short_call_id,
)

_PYTHON_CALL = CallFormat(
    opening="[",
    separator=", ",
    closing="]",
    head="{name}(",
    tail=")",
    names=r"[A-Za-z_][\w.-]*",
    parameters=ParameterFormat("{key}=", separator=", ", has_plain_text=False, keys=r"[A-Za-z_]\w*"),
    has_marker=False,
)
_UNMARKED_LIST = r"\[\s*[A-Za-z_][\w.-]*(?:\(|$)"
_PYTHONIC = ToolFormat(
    "pythonic",
    lambda _: pythonic.PythonicParser(),
    (pythonic.BEGIN, pythonic.END),
    (("[func_name1(params_name1=params_value1",),),
    _PYTHON_CALL,
    unmarked=_UNMARKED_LIST,
)
_LLAMA4_PYTHONIC = replace(
    _PYTHONIC,
    name="llama4_pythonic",
    template_markers=(("<|header_start|>", "[func_name1("), ("<|header_start|>", "python list of the function calls")),
)
_GEMMA3 = replace(
    _PYTHONIC,
    name="gemma3",
    parser=lambda _: pythonic.PythonicParser(may_be_fenced=True),
    template_markers=(("<start_of_turn>", "<start_of_image>"), ("<start_of_turn>", "[func_name1(")),
    unmarked=f"{_UNMARKED_LIST}|{begun('```tool_code')}",
)

_QWEN3_CODER_TAGS = Tags(
    "<function=",
    ">",
    "</function>",
    "<parameter=",
    ">",
    "</parameter>",
    begin="<tool_call>",
    end="</tool_call>",
    has_lines=True,
)
_QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    partial(TaggedParser, _QWEN3_CODER_TAGS),
    ("<tool_call>", "</tool_call>"),
    (("<function=", "<parameter="),),
    CallFormat(
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
        head="<function={name}>\n",
        tail="</function>",
        parameters=ParameterFormat("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    unmarked=begun("<function="),
)
_GLM45_TAGS = Tags("<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>", value="<arg_value>")
_GLM45 = ToolFormat(
    "glm45",
    partial(TaggedParser, _GLM45_TAGS),
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    (("<arg_key>", "<arg_value>"),),
    CallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        separator="\n",
        head="{name}\n",
        parameters=ParameterFormat("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
)
_MINIMAX_M2_TAGS = Tags(
    '<invoke name="',
    '">',
    "</invoke>",
    '<parameter name="',
    '">',
    "</parameter>",
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
)
_MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    partial(TaggedParser, _MINIMAX_M2_TAGS),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    (("minimax:tool_call", '<invoke name="'),),
    CallFormat(
        opening="<minimax:tool_call>\n",
        closing="</minimax:tool_call>",
        head='<invoke name="{name}">\n',
        tail="</invoke>\n",
        parameters=ParameterFormat('<parameter name="{key}">', "</parameter>\n"),
    ),
    unmarked=begun('<invoke name="'),
)

_V3, _V31, _K2 = sectioned.DEEPSEEK_V3, sectioned.DEEPSEEK_V31, sectioned.KIMI_K2
_DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    lambda _: SectionedParser(_V3),
    _V3.markers,
    ((_V3.separator, "```json"),),
    CallFormat(
        begin=_V3.call,
        end=_V3.call_end,
        separator="\n",
        opening=_V3.begin,
        closing=_V3.end,
        head=f"function{_V3.separator}{{name}}\n```json\n",
        tail="\n```",
    ),
)
_DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    lambda _: SectionedParser(_V31),
    _V31.markers,
    ((_V31.separator,),),
    CallFormat(
        begin=_V31.call,
        end=_V31.call_end,
        opening=_V31.begin,
        closing=_V31.end,
        head=f"{{name}}{_V31.separator}",
    ),
)
_KIMI_K2 = ToolFormat(
    "kimi_k2",
    lambda _: SectionedParser(_K2),
    _K2.markers,
    ((_K2.begin,), ("tool_declare", "<|im_middle|>")),
    CallFormat(
        begin=_K2.call,
        end=_K2.call_end,
        opening=_K2.begin,
        closing=_K2.end,
        head=f"functions.{{name}}:{{index}}{_K2.separator}",
    ),
)

_GRANITE_MARKER = "<|tool_call|>"
_GRANITE = ToolFormat(
    "granite",
    lambda _: JsonListParser((_GRANITE_MARKER, "<tool_call>")),
    (_GRANITE_MARKER, "<tool_call>"),
    ((_GRANITE_MARKER, "<|start_of_role|>"),),
    CallFormat(opening=f"{_GRANITE_MARKER}[", separator=", ", closing="]"),
)
_PHI4_BEGIN, _PHI4_END = "<|tool_call|>", "<|/tool_call|>"
_FUNCTOOLS = "functools["
_PHI4_MINI_JSON = ToolFormat(
    "phi4_mini_json",
    lambda _: JsonListParser((_FUNCTOOLS, _PHI4_BEGIN), (_PHI4_END,)),
    (_FUNCTOOLS, _PHI4_BEGIN, _PHI4_END),
    ((_FUNCTOOLS,),),
    CallFormat(opening=_FUNCTOOLS, separator=", ", closing="]"),
)
_PHI4_MARKED = replace(
    _PHI4_MINI_JSON,
    template_markers=(("<|tool|>", "<|/tool|>"),),
    call_format=CallFormat(opening=f"{_PHI4_BEGIN}[", separator=", ", closing=f"]{_PHI4_END}"),
)
"""The same parser for Microsoft's own template, which puts the calls between special tokens."""

HARMONY = ToolFormat(
    "openai",
    harmony.HarmonyParser,
    harmony.MARKERS,
    ((harmony.CHANNEL, harmony.MESSAGE, "analysis"),),
    CallFormat(
        begin=f"{harmony.CHANNEL}commentary to=functions.",
        head=f"{{name}} {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        is_single=True,
    ),
    unmarked=begun("to=functions"),
    has_channels=True,
)

_BY_TEMPLATE = (
    HARMONY,
    _GLM45,
    _MINIMAX_M2,
    _KIMI_K2,
    _DEEPSEEK_V3,
    _DEEPSEEK_V31,
    _GRANITE,
    _PHI4_MINI_JSON,
    _PHI4_MARKED,
    _GEMMA3,
    _LLAMA4_PYTHONIC,
    _LLAMA3_JSON,
    _MISTRAL,
    _PYTHONIC,
    _QWEN3_CODER,
    HERMES,
)
"""In the order of the search: formats whose templates have the markers of others too come first."""
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in reversed(_BY_TEMPLATE)}
"""By name. Of two formats of one name, the first is the default."""


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template uses; None if it is unknown."""
    for tool_format in _BY_TEMPLATE:
        if any(all(text in source for text in texts) for texts in tool_format.template_markers):
            return tool_format
    return None
