"""A model in object storage: the download of a Job with the keys of a Secret, and real weights."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from operator_support.process_node import ProcessNode
from operator_support.questions import ask
from operator_support.resource import Resource
from suite_support.gcs_server import GcsServer, gcs_server
from suite_support.object_server import ObjectServer, object_server

pytestmark = [pytest.mark.usefixtures("controllers"), pytest.mark.model, pytest.mark.timeout(400)]


@pytest.fixture(params=["s3", "gs"])
def server(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[ObjectServer | GcsServer]:
    """A server with the small model in a bucket."""
    with object_server("models") if request.param == "s3" else gcs_server("models") as server:
        server.put("models", {f"smollm2/v1/{smollm2_path.name}": smollm2_path.read_bytes()})
        yield server


async def test_a_model_of_a_bucket_is_served(
    chat: Resource, machine: ProcessNode, server: ObjectServer | GcsServer, smollm2_path: Path, tmp_path: Path
) -> None:
    literals = [f"--from-literal={name}={value}" for name, value in server.environment.items()]
    if isinstance(server, GcsServer):
        (tmp_path / "key.json").write_text(server.account)
        literals = [
            f"--from-file=GOOGLE_SERVICE_ACCOUNT_KEY={tmp_path / 'key.json'}",
            "--from-literal=NO_PROXY=127.0.0.1",
        ]
    await chat.kubectl("create", "secret", "generic", "bucket", *literals)
    scheme = "gs" if isinstance(server, GcsServer) else "s3"
    storage = {"uri": f"{scheme}://models/smollm2/v1/{smollm2_path.name}", "credentialsSecret": "bucket"}
    await chat.create(
        model={
            "source": {"objectStorage": storage},
            "cache": {"hostPath": {"path": str(tmp_path / "models"), "nodes": [machine.name]}},
            "servedName": "smollm2",
            "dtype": "float32",
        },
        engine={"kvCacheMemory": "64Mi"},
    )
    status = await chat.until_phase("Running", within=240)
    assert (status["cache"]["phase"], status["cache"]["downloadedBytes"]) == ("Ready", status["cache"]["totalBytes"])
    address = await machine.service_address("chat")
    async with openai.AsyncOpenAI(base_url=f"http://{address}:8000/v1", api_key="unused", timeout=120) as client:
        assert "Paris" in await ask(client)
