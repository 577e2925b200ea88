"""The tests that run the `console` blocks of the docs, and the blocks that no test runs, with the reason.

A block is named by its page and the beginning of its first command. tests/operator/test_docs.py checks that every block
is here, and that the tests take the block from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from suite_support.doc_blocks import DocBlock, Step, doc_blocks

Name = tuple[str, str]


@dataclass(frozen=True)
class Run:
    """The functions that run the commands of a block, but not those of some programs, with the reason."""

    functions: tuple[str, ...]
    but: Mapping[str, str] = field(default_factory=dict)


INSTALLATION = "tests/cluster/test_chart_installation.py"
OPERATOR_PAGES = "tests/cluster/test_docs_operator.py"
SERVERS = "tests/runtime/server/test_docs_servers.py"
ON_THE_NODE = "README's quickstart has it, which tests/cluster/test_node_serving.py runs with buildah on a node"
RUN: dict[Name, Run] = {
    ("README.md", "helm install megatron"): Run((f"{INSTALLATION}::test_the_readme_installs_and_serves_a_model",)),
    ("README.md", "kubectl megatron describe"): Run((f"{OPERATOR_PAGES}::test_the_plugin_runs_as_in_the_docs",)),
    ("docs/command-line.md", "megatron-serve model fetch"): Run(
        (
            f"{SERVERS}::test_the_sample_model_is_where_the_server_looks_for_it",
            f"{SERVERS}::test_two_groups_of_four_ranks_answer",
            "tests/runtime/server/conftest.py::shared_pod",
        )
    ),
    ("docs/command-line.md", "kubectl megatron describe"): Run(
        (f"{OPERATOR_PAGES}::test_the_plugin_runs_as_in_the_docs",)
    ),
    ("docs/command-line.md", "megatron-operator local"): Run(
        ("tests/e2e/conftest.py::served", f"{INSTALLATION}::test_the_readme_installs_and_serves_a_model")
    ),
    ("docs/examples.md", "kind create cluster"): Run(
        (f"{INSTALLATION}::test_resources_and_their_definition_survive_the_release_and_are_adopted_by_its_successor",),
        but={"kind": ON_THE_NODE, "docker": ON_THE_NODE},
    ),
    ("docs/examples.md", "printf"): Run(
        ("tests/cluster/test_publishing.py::test_a_model_is_published_as_an_image_by_the_commands_of_the_docs",)
    ),
    ("docs/examples.md", "kubectl create secret generic hub"): Run(
        (f"{OPERATOR_PAGES}::test_secrets_are_created_as_in_the_docs",)
    ),
    ("docs/examples.md", "kubectl create secret generic bucket"): Run(
        (f"{OPERATOR_PAGES}::test_secrets_are_created_as_in_the_docs",)
    ),
    ("docs/http-api.md", "megatron-serve"): Run((f"{SERVERS}::test_adapters_are_loaded_and_unloaded",)),
    ("docs/http-api.md", "curl http://megatron-megatron-inference-activator"): Run(
        (
            "tests/cluster/test_operator_scale_to_zero.py"
            "::test_a_request_for_an_adapter_and_that_of_the_docs_start_the_real_runtime",
        )
    ),
    ("docs/install.md", "docker buildx build"): Run(
        (f"{INSTALLATION}::test_helm_test_checks_that_the_operator_runs",),
        but={"docker": "pushes to a registry; tests/cluster/prepare_images.py builds these Dockerfiles with buildah"},
    ),
    ("docs/install.md", "helm install megatron"): Run(
        (f"{INSTALLATION}::test_helm_test_checks_that_the_operator_runs",)
    ),
    ("docs/install.md", "helm upgrade megatron"): Run(
        (f"{INSTALLATION}::test_an_upgrade_from_the_version_before_brings_new_fields_and_keeps_the_resources",)
    ),
    ("docs/install.md", "kubectl delete megatroninferences"): Run(
        (f"{INSTALLATION}::test_resources_and_their_definition_survive_the_release_and_are_adopted_by_its_successor",)
    ),
    ("docs/install.md", "kubectl apply -k manifests"): Run(
        (f"{INSTALLATION}::test_kubectl_installs_the_manifests_and_removes_the_activator",)
    ),
    ("docs/install.md", "kubectl delete deployment"): Run(
        (f"{INSTALLATION}::test_kubectl_installs_the_manifests_and_removes_the_activator",)
    ),
    ("docs/install.md", "kubectl get leases"): Run(
        ("tests/cluster/test_operator_lease.py::test_one_of_two_operators_acts_and_the_other_does_nothing",)
    ),
    ("docs/lifecycle.md", "kubectl patch mi chat"): Run(
        (f"{OPERATOR_PAGES}::test_a_resource_is_inspected_and_suspended_as_in_the_docs",)
    ),
    ("docs/operations.md", "kubectl get mi -A"): Run(
        (f"{OPERATOR_PAGES}::test_a_resource_is_inspected_and_suspended_as_in_the_docs",)
    ),
    ("docs/operations.md", "kubectl delete poddisruptionbudgets"): Run(
        (f"{OPERATOR_PAGES}::test_a_resource_is_inspected_and_suspended_as_in_the_docs",)
    ),
    ("docs/operations.md", "kubectl get jobs"): Run(
        (
            "tests/cluster/test_operator_cache_eviction.py"
            "::test_the_model_of_a_deleted_resource_is_evicted_also_if_no_operator_ran_meanwhile",
        )
    ),
    ("docs/operations.md", "python3 -m megatron_runtime"): Run(
        ("tests/runtime/test_launch_kernels.py::test_the_command_of_the_docs_compiles_kernels",)
    ),
    ("docs/releasing.md", "sha256sum --check"): Run(
        ("tests/cluster/test_publishing.py::commands",), but={"twine": "uploads to PyPI"}
    ),
    ("docs/releasing.md", "helm install megatron oci://"): Run(("tests/cluster/test_publishing.py::commands",)),
    ("docs/sampling.md", "megatron-serve"): Run(
        (
            "tests/runtime/server/test_launched_draft_model.py"
            "::test_answers_are_those_without_a_draft_model_and_drafts_are_counted",
        )
    ),
    ("docs/security.md", "kubectl delete secret chat-keys"): Run(
        ("tests/cluster/test_operator_keys.py::test_a_deleted_secret_is_replaced_with_new_keys_and_new_pods",)
    ),
}
NOT_RUN: dict[Name, str] = {
    ("docs/development.md", "make test"): "runs the tests themselves, for up to an hour",
    ("docs/development.md", "MEGATRON_TEST_USE_KUBECONFIG=1"): "needs a cluster that pulls images from a registry",
    ("docs/install.md", "make demo"): "makes an environment; tests/e2e/test_local_demo.py runs the demo in this one",
    ("docs/performance.md", "make gpu"): "needs a GPU",
    ("docs/releasing.md", "make release"): "builds all images, with several GB of downloads",
    ("docs/releasing.md", "make release IMAGES=none"): "tests/operator/test_release.py compares two builds",
    ("docs/reliability.md", "make chaos"): "takes forty minutes for each command",
}


def block_of(name: Name) -> DocBlock:
    """The block with this name: its first command is or, if there is none such, begins like this."""
    page, begin = name
    found = [block for block in doc_blocks("console") if block.page == page and block.begin.startswith(begin)]
    (block,) = [block for block in found if block.begin == begin] or found
    return block


def documented(page: str, begin: str) -> list[Step]:
    """The commands of a block in `RUN`, for the tests there."""
    but = RUN[page, begin].but
    return [step for step in block_of((page, begin)).steps if step.words[0] not in but]
