"""Fields that describe the format of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_runtime.server.bodies.limits import GuidedChoices, GuidedJson, GuidedText, Schema
from megatron_runtime.server.bodies.only import Only


class JsonSchema(BaseModel):
    """``json_schema`` of a ``response_format``; every schema is enforced strictly."""

    name: str = "answer"
    definition: Schema = Field(default_factory=dict, alias="schema")


class ResponseFormat(BaseModel):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _a_schema_for_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be set for type json_schema, and for no other type")
        return self

    @property
    def schema_to_keep(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for text."""
        if self.json_schema is not None:
            return self.json_schema.definition
        return {"type": "object"} if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """vLLM's newer name for its ``guided_`` fields.

    The options that only permit white space, further properties or another backend are accepted: answers have no
    optional white space and only the properties of their schema, which these options permit too.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    schema_of_json: GuidedJson | None = Field(None, alias="json")
    regex: GuidedText | None = None
    choice: GuidedChoices | None = None
    grammar: GuidedText | None = None
    json_object: Literal[True] | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    structural_tag: Annotated[Any, Only(None)] = None
    whitespace_pattern: Annotated[Any, Only(None)] = None
