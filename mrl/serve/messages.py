"""Declares the protobuf messages of the `tinker` client, by their numbers.

A client sends `ForwardBackwardRequest`, and reads `ForwardBackwardOutput` and `SampleResponse`; all else is JSON. The
numbers are those of tinker 0.38.0, tinker/proto/tinker_public_pb2.py (Apache-2.0). They are declared here, and not
imported from there: a server then works beside any version of the client, or none.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "mrl.tinker"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {name: getattr(_FIELD, f"TYPE_{name.upper()}") for name in ("bytes", "string", "bool", "double")}
_SCALARS |= {name: getattr(_FIELD, f"TYPE_{name.upper()}") for name in ("int32", "int64", "uint32")}

# message -> its fields, as in a .proto file. An enum is an int32 on the wire. "one of" marks members of a union,
# "optional" what may be absent where 0 is a value.
_SCHEMA = {
    "SampleResponse": """
        repeated SampledSequence sequences = 1
        optional bytes prompt_logprobs = 2
        TopkLogprobs topk_prompt_logprobs = 3
        int32 prompt_cache_hit_tokens = 4""",
    "SampledSequence": """
        int32 stop_reason = 1
        bytes tokens = 2
        optional bytes logprobs = 3
        TopkLogprobs topk_sampled_logprobs = 4""",
    "TopkLogprobs": """
        bytes token_ids = 1
        bytes logprobs = 2
        uint32 k = 3
        uint32 length = 4""",
    "SparseCsr": """
        bytes values = 1
        bytes crow_indices = 2
        bytes col_indices = 3""",
    "Tensor": """
        oneof bytes dense = 1
        oneof SparseCsr sparse_csr = 2
        int32 dtype = 3
        repeated int64 shape = 4""",
    "BatchedTensor": """
        bytes data = 1
        bytes offsets = 2
        int32 dtype = 3
        repeated int64 trailing_shape = 4""",
    "ArrayRecord": """
        string type_tag = 1
        map BatchedTensor fields = 2
        int64 num_datums = 3""",
    "ForwardBackwardOutput": """
        string loss_fn_output_type = 1
        repeated ArrayRecord loss_fn_outputs = 2
        map double metrics = 3""",
    "ForwardBackwardRequest": """
        string model_id = 1
        int32 seq_id = 2
        repeated Datum data = 3
        string loss_fn = 4
        map double loss_fn_config = 5
        bool forward_only = 6
        map LossConfigValue loss_fn_config_v2 = 7""",
    "LossConfigValue": """
        oneof double number = 1
        oneof string text = 2""",
    "Datum": """
        repeated Chunk model_input = 1
        map Tensor loss_fn_inputs = 2""",
    "Chunk": """
        oneof EncodedTextChunk encoded_text = 1
        oneof ImageChunk image = 2
        oneof DmelChunk dmel = 3""",
    "EncodedTextChunk": "bytes tokens = 1",
    "ImageChunk": """
        bytes data = 1
        string format = 2
        optional int32 expected_tokens = 3""",
    "DmelChunk": "bytes dmel = 1",
}
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""`dtype` of a Tensor."""
STOP, LENGTH = 0, 1
"""`stop_reason` of a SampledSequence."""


def _declare() -> dict[str, Any]:
    """Returns the class of each message of the schema, by its name."""
    file = descriptor_pb2.FileDescriptorProto(name="mrl/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for line in fields.strip().splitlines():
            *label, kind, field, _, number = line.split()
            _add(message, label[0] if label else "", kind, field, int(number))
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)  # unions of one come last
                message.oneof_decl.add(name=f"_{field.name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


def _add(message: Any, label: str, kind: str, name: str, number: int) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if label == "map":
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add(entry, "", "string", "key", 1)
        _add(entry, "", kind, "value", 2)
        field.label, field.type, field.type_name = (
            _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
        )  # fmt: skip
        return
    if label == "repeated":
        field.label = _FIELD.LABEL_REPEATED
    elif label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value")
        field.oneof_index = 0
    elif label == "optional":
        field.proto3_optional = True
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_MESSAGES = _declare()
ForwardBackwardRequest: Any = _MESSAGES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _MESSAGES["ForwardBackwardOutput"]
SampleResponse: Any = _MESSAGES["SampleResponse"]
