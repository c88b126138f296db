"""The events of a micro-batch, derived from a description: what is called, and what backward visits."""

from z3trace.engine.schedule.calls import EventKind, backward_events, call_tree, forward_events
from z3trace.engine.schedule.model_file import Description, parse_description

SIGNS = {
    EventKind.PRE_FORWARD: ">",
    EventKind.POST_FORWARD: "<",
    EventKind.PRE_BACKWARD: "B",
    EventKind.POST_BACKWARD: "E",
    EventKind.GRADIENT_READY: "g",
    EventKind.PARAMETER_READ: "r",
    EventKind.PARAMETER_RETURNED: "o",
}


def describe(modules: list[str], parameters: dict[str, dict] | list[str], **more) -> Description:
    named = parameters if isinstance(parameters, dict) else {name: {} for name in parameters}
    sized = {name: {"numel": 1, **entry} for name, entry in named.items()}
    return parse_description({"modules": modules, "parameters": sized, **more})


def forward(description: Description) -> str:
    return written(forward_events(call_tree(description.model, description.facts)))


def backward(description: Description) -> str:
    call = call_tree(description.model, description.facts)
    return written(backward_events(description.model, call, description.facts))


def written(events) -> str:
    return " ".join(
        SIGNS[event.kind] + (event.partition or event.module or "/") + "!" * event.recompute
        for event in events
    )


MODEL = ["", "embed", "layers", "layers.0", "layers.0.fc", "layers.1", "layers.1.fc", "head"]
WEIGHTS = ["embed.w", "layers.0.fc.w", "layers.1.fc.w", "head.w"]


def test_backward_is_forward_reversed():
    description = describe(MODEL, WEIGHTS)
    assert forward(description) == (
        ">/ >embed <embed >layers.0 >layers.0.fc <layers.0.fc <layers.0 "
        ">layers.1 >layers.1.fc <layers.1.fc <layers.1 >head <head </"
    )
    # No input of the root or of the embedding requires a gradient: their backward is never left.
    assert backward(description) == (
        "B/ Bhead ghead.w Ehead Blayers.1 Blayers.1.fc glayers.1.fc.w Elayers.1.fc Elayers.1 "
        "Blayers.0 Blayers.0.fc glayers.0.fc.w Elayers.0.fc Elayers.0 Bembed gembed.w"
    )


def test_lists_of_blocks_are_not_called_but_sequentials_are():
    names = ["", "net", "net.0", "net.1", "net.2"]
    assert ">net " in forward(describe(names, ["net.0.w", "net.2.w"]))
    listed = describe(names, ["net.0.w"], classes={"net": "torch.nn.modules.container.ModuleList"})
    assert ">net " not in forward(listed)
    sequential = {"layers": "torch.nn.modules.container.Sequential"}
    assert ">layers " in forward(describe(MODEL, WEIGHTS, classes=sequential))


def test_activations_and_rotary_embeddings_are_called_where_models_call_them():
    names = ["", "embed", "layers"]
    for number in range(2):
        block = f"layers.{number}"
        names += [block, *(f"{block}.mlp{part}" for part in ("", ".gate", ".up", ".down", ".act_fn"))]
    names += ["norm", "rotary_emb"]
    weights = [
        f"{name}.w" for name in names if name.rpartition(".")[2] in ("embed", "gate", "up", "down", "norm")
    ]
    called = [event.module for event in forward_events(call_tree(describe(names, weights).model))]
    begun = list(dict.fromkeys(called))
    assert begun[1:5] == ["embed", "rotary_emb", "layers.0", "layers.0.mlp"]
    assert begun[5:9] == [f"layers.0.mlp.{part}" for part in ("gate", "act_fn", "up", "down")]
    assert begun[-1] == "norm"
    attention = ["", "q", "k", "out", "rotary_emb"]
    order = call_tree(describe(attention, ["q.w", "k.w", "out.w"]).model).inner
    assert [call.module for call in order] == ["q", "k", "rotary_emb", "out"]
    # In a Sequential the place is the call's.
    order = call_tree(describe(["", "net", "net.0", "net.1", "net.2"], ["net.0.w", "net.1.w"]).model)
    assert [call.module for call in order.inner[0].inner] == ["net.0", "net.1", "net.2"]


def test_norms_registered_last_are_called_where_their_names_say():
    names = ["", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
    order = call_tree(describe(names, [f"{name}.w" for name in names[1:]]).model).inner
    assert [call.module for call in order] == [
        "input_layernorm",
        "self_attn",
        "post_attention_layernorm",
        "mlp",
    ]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    order = call_tree(describe(names, [f"{name}.w" for name in names[1:]]).model).inner
    assert [call.module for call in order[2:]] == [
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "mlp",
        "post_feedforward_layernorm",
    ]


def test_frozen_modules_before_the_first_trained_one_have_no_backward():
    frozen = {name: {"trainable": name == "layers.1.fc.w"} for name in WEIGHTS}
    assert backward(describe(MODEL, frozen)) == "B/ Bhead Ehead Blayers.1 Blayers.1.fc glayers.1.fc.w"


def test_projections_of_a_frozen_input_have_no_backward_of_their_own():
    """q has an adapter that trains, and k takes the same input as q: nothing flows back through k."""
    names = ["", "x", "q_proj", "q_proj.base_layer", "q_proj.lora_A", "k_proj", "out"]
    frozen = {f"{name}.w": {"trainable": name == "q_proj.lora_A"} for name in ("x", *names[3:])}
    assert backward(describe(names, frozen)) == "B/ Bout Eout Bq_proj Bq_proj.lora_A gq_proj.lora_A.w"


def test_pefts_layers_read_their_adapters_weight():
    names = ["", "q", "q.base_layer", "q.lora_A", "q.lora_A.default", "q.lora_B", "q.lora_B.default"]
    weights = ["q.base_layer.w", "q.lora_A.default.w", "q.lora_B.default.w"]
    lists = {"q.lora_A": "torch.nn.ModuleDict", "q.lora_B": "torch.nn.ModuleDict"}
    description = describe(names, weights, classes={**lists, "q": "peft.tuners.lora.layer.Linear"})
    assert forward(description) == (
        ">/ >q >q.base_layer <q.base_layer rq.lora_A.default.w "
        ">q.lora_A.default <q.lora_A.default >q.lora_B.default <q.lora_B.default <q </"
    )
    assert " r" not in forward(describe(names, weights, classes=lists))


def test_rotary_embeddings_have_no_backward():
    assert backward(describe(["", "fc", "rotary_emb", "out"], ["fc.w", "out.w"])) == (
        "B/ Bout gout.w Eout Bfc gfc.w"
    )


def test_a_second_embedding_takes_no_gradient_back():
    description = describe(["", "wte", "wpe", "fc"], ["wte.w", "wpe.w", "fc.w"])
    assert backward(description) == "B/ Bfc gfc.w Efc Bwpe gwpe.w Bwte gwte.w"


def test_a_tied_gradient_is_ready_after_its_first_use():
    tied = {"embed.w": {"owners": ["embed", "head"]}, "fc.w": {}}
    assert (
        backward(describe(["", "embed", "fc", "head"], tied))
        == "B/ Bhead Ehead Bfc gfc.w Efc Bembed gembed.w"
    )


def test_calls_may_be_given_in_their_order():
    description = describe(["", "a", "b"], ["a.w", "b.w"], calls={"order": ["", "b", "a", "b"]})
    assert forward(description) == ">/ >b <b >a <a >b <b </"
    assert backward(description) == "B/ Bb Eb Ba ga.w Ea Bb gb.w"


def test_checkpointing_recomputes_up_to_the_last_call():
    blocks = ["", "embed", "block", "block.ln", "block.fc1", "block.fc2", "head"]
    weights = ["embed.w", "block.ln.w", "block.fc1.w", "block.fc2.w", "head.w"]
    description = describe(blocks, weights, calls={"checkpointed": ["block"]})
    assert backward(description) == (
        "B/ Bhead ghead.w Ehead Bblock Bblock.fc2 "
        ">block! >block.ln! <block.ln! >block.fc1! <block.fc1! >block.fc2! "
        "gblock.fc2.w Eblock.fc2 Bblock.fc1 gblock.fc1.w Eblock.fc1 Bblock.ln gblock.ln.w Eblock.ln Eblock "
        "Bembed gembed.w"
    )


def test_reentrant_checkpointing_recomputes_everything_first():
    calls = {"checkpointed": ["block"], "reentrant": True}
    description = describe(["", "embed", "block", "block.fc"], ["embed.w", "block.fc.w"], calls=calls)
    assert backward(description) == (
        "B/ >block! >block.fc! <block.fc! <block! Bblock Bblock.fc gblock.fc.w Eblock.fc Eblock Bembed gembed.w"
    )


def test_checkpointing_inside_a_module_recomputes_what_it_calls():
    names = ["", "embed", "block", "block.a", "block.b"]
    weights = ["embed.w", "block.a.w", "block.b.w"]
    description = describe(names, weights, calls={"checkpointed_bodies": ["block"]})
    assert backward(description) == (
        "B/ Bblock Bblock.b >block.a! <block.a! >block.b! gblock.b.w Eblock.b Bblock.a gblock.a.w Eblock.a Eblock "
        "Bembed gembed.w"
    )
    reentrant = {"checkpointed_bodies": ["block"], "reentrant": True}
    assert backward(describe(names, weights, calls=reentrant)).startswith(
        "B/ Bblock >block.a! <block.a! >block.b! <block.b! Bblock.b gblock.b.w"
    )


def test_a_repeated_call_is_recomputed_up_to_its_last_time():
    calls = {"order": ["", "embed", "block", "block.a", "block.a"], "checkpointed": ["block"]}
    description = describe(["", "embed", "block", "block.a"], ["embed.w", "block.a.w"], calls=calls)
    assert backward(description) == (
        "B/ Bblock Bblock.a >block! >block.a! <block.a! >block.a! Eblock.a Bblock.a gblock.a.w Eblock.a Eblock "
        "Bembed gembed.w"
    )


def test_addmm_completes_the_gradient_of_the_bias_first():
    classes = {"fc": "transformers.pytorch_utils.Conv1D"}
    description = describe(["", "fc"], ["fc.weight", "fc.bias"], classes=classes)
    assert backward(description) == "B/ Bfc gfc.bias gfc.weight"


def test_what_is_known_of_calls_overrides_the_inference():
    calls = {
        "grad_inputs": {"b": 0},
        "grad_outputs": {"b": 2},
        "reads": {"": ["b.w"]},
        "returns": {"a": ["a.bias"]},
    }
    description = describe(["", "a", "b"], ["a.w", "a.bias", "b.w"], calls=calls)
    assert forward(description) == ">/ >a oa.bias <a rb.w >b <b </"
    assert backward(description) == "B/ Bb Bb gb.w Ba ga.bias Ba ga.w"
