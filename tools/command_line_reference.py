"""Generates ``docs/command-line.md`` from the command lines of ``megatron-serve`` and ``megatron-operator``.

``python tools/command_line_reference.py`` writes it, from the repository's root; ``--check`` only checks that it is up
to date. Commands, flags, defaults and descriptions come from the code; the introductions are defined here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from generated_page import write_or_check

from megatron_operator.cli import app as operator_app
from megatron_operator.commands.cli_options import VERBS
from megatron_operator.commands.console import OPERATOR, PLUGIN
from megatron_runtime.cli import app as serve_app
from megatron_runtime.launch.flags import GROUPS

PAGE = Path("docs/command-line.md")
SERVE = "megatron-serve"
CONNECTION = ("namespace", "context", "kubeconfig")
"""Options that all user commands have; the introduction describes them."""
ON_THE_MACHINE = ("local", "run", "crd")
"""Commands of ``megatron-operator`` that the plugin does not have."""

HEADER = """<!-- Generated from the code and tools/command_line_reference.py by `make crd`. Do not edit. -->

# Command line

`make venv` puts the programs into `.venv/bin`; `. .venv/bin/activate` adds that folder to `PATH`.
`pip install '.[operator]'` in a checkout installs `megatron-operator` and `kubectl-megatron` alone, without PyTorch,
and `pip install '.[runtime]'` installs `megatron-serve`.

| program | what it does |
|---|---|
| `megatron-serve` | serves a model on this machine; the pods of a resource run it too |
| `megatron-operator` | runs the operator, or a resource without a cluster; has all user commands |
| `kubectl-megatron` | the user commands alone; kubectl runs it as `kubectl megatron` |

Errors are one line that names the flag or field, the value and the remedy. The exit code is 0, 1 if the command failed,
or 2 for an invalid command line.
"""
SERVE_INTRODUCTION = """
The model is a file or folder with `--model`, or a repository of the Hugging Face hub with `--hf-repo`. The checkpoint's
formats are GGUF, Hugging Face safetensors and Megatron's `torch_dist`.

```console
$ megatron-serve model fetch                                       # a small model to try; prints its path
$ megatron-serve --model ~/.cache/megatron-inference/models/SmolLM2-135M-Instruct.Q4_1.gguf --served-name smollm2
$ megatron-serve --model PATH --tensor-parallel 2 --pipeline-parallel 2 --replica-groups 2   # two groups of four ranks
$ megatron-serve --model PATH --check                              # options, checkpoint and memory; serves nothing
```
"""
USER_INTRODUCTION = """
The user commands use the cluster and namespace of the kubeconfig, or `--kubeconfig`, `--context` and `--namespace`
(`-n`). They access only the API server.

```console
$ kubectl megatron describe smollm2
$ kubectl megatron chat smollm2 "What is the capital of France?"
$ kubectl megatron logs smollm2 --follow --rank 0
$ kubectl megatron suspend smollm2 --wait
$ kubectl megatron doctor
```

The lifecycle commands change only `spec.lifecycle`. With `--wait` they return when the state is reached, and fail with
the reason when the resource fails, another client changes the lifecycle, or `--timeout` expires. A command that is not
possible in the current state, such as `unpause` of a stopped resource, is rejected with the one that is.

`chat` uses the API server's proxy to the Service, which requires the right to `create` `services/proxy`. This proxy
uses the header `Authorization` itself, so the endpoint also accepts API keys as `X-Api-Key`. `doctor` exits with 1 if a
prerequisite is missing.
"""
OPERATOR_INTRODUCTION = """
```console
$ megatron-operator local -f manifests/samples/smollm2.yaml --map-path /models=$HOME/.cache/megatron-inference/models
$ megatron-operator run --namespace default
```
"""


def reference_text() -> str:
    """The text of the page."""
    serve, operator = typer.main.get_command(serve_app), typer.main.get_command(operator_app)
    commands = operator.commands  # type: ignore[attr-defined]
    parts = [HEADER, f"\n## {SERVE}\n", SERVE_INTRODUCTION, *_serve_flags(serve)]
    parts += [_command(f"{SERVE} model {name}", each) for name, each in _commands_below(serve, "model")]
    parts += ["\n## kubectl megatron\n", USER_INTRODUCTION, _verbs(commands[next(iter(VERBS))])]
    others = [name for name in commands if name not in (*VERBS, *ON_THE_MACHINE)]
    parts += [_command(f"{PLUGIN.replace('-', ' ')} {name}", commands[name], CONNECTION) for name in others]
    parts += [f"\n## {OPERATOR}\n", OPERATOR_INTRODUCTION]
    parts += [_command(f"{OPERATOR} {name}", commands[name]) for name in ON_THE_MACHINE]
    return "".join(parts)


def _commands_below(group: Any, name: str) -> Iterable[tuple[str, Any]]:
    below: dict[str, Any] = group.commands[name].commands
    return below.items()


def _serve_flags(serve: Any) -> Iterator[str]:
    """A table per group of flags, and one for the flags of the command itself."""
    parameters = {each.name: each for each in serve.params}
    for group in GROUPS:
        title = (group.__doc__ or "").partition(";")[0].rstrip(".")
        yield f"\n### {title}\n\n" + _table(parameters.pop(name) for name in group.__dataclass_fields__)
    yield "\n### Other\n\n" + _table(parameters.values())


def _verbs(example: Any) -> str:
    rows = "".join(f"| `{verb}` | {words} |\n" for verb, words in VERBS.items())
    head = "\n### Lifecycle commands\n\n| command | what it does |\n|---|---|\n"
    return head + rows + "\n" + _table(each for each in example.params if each.name not in CONNECTION)


def _command(title: str, command: Any, left_out: Iterable[str] = ()) -> str:
    parameters = [each for each in command.params if each.name not in left_out and each.name != "help"]
    table = f"\n{_table(parameters)}" if parameters else ""
    return f"\n### {title}\n\n{' '.join(command.help.split())}\n{table}"


def _table(parameters: Iterable[Any]) -> str:
    head = "| flag or argument | default | what it does |\n|---|---|---|\n"
    return head + "".join(f"| {_name(each)} | {_default(each)} | {_words(each)} |\n" for each in parameters)


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    switches = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{switch}`" for switch in switches)


def _default(parameter: Any) -> str:
    """The default as on the command line; nothing where the description has it, or there is none."""
    value = parameter.default
    if parameter.required:
        return "required"
    if isinstance(value, bool):
        switches = parameter.opts if value else parameter.secondary_opts
        return f"`{switches[0]}`" if switches else ""
    if value is None or value == ():
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _words(parameter: Any) -> str:
    variable = f" Environment: `{parameter.envvar}`." if parameter.envvar else ""
    return f"{' '.join((parameter.help or '').split())}{variable}".replace("|", "\\|")


if __name__ == "__main__":
    write_or_check(PAGE, reference_text, __doc__)
