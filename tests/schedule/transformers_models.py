"""Small models of the transformers library, as people train them; run by real DeepSpeed beside the schedule."""

import transformers
from deepspeed_models import ROUTE, VOCABULARY
from peft import LoraConfig, get_peft_model

__all__ = ["FAMILIES", "LEAVES", "ROUTE", "VOCABULARY", "logits_of"]


def llama(width: int, depth: int) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def checkpointed_llama(width: int, depth: int) -> transformers.PreTrainedModel:
    model = llama(width, depth)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def reentrant_llama(width: int, depth: int) -> transformers.PreTrainedModel:
    model = llama(width, depth)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def lora_llama(width: int, depth: int):
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(llama(width, depth), adapters)


def tied_gpt2(width: int, depth: int) -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_layer=depth,
        n_head=1,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral(width: int, depth: int) -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=16,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


FAMILIES = {
    make.__name__: make
    for make in (llama, checkpointed_llama, reentrant_llama, lora_llama, tied_gpt2, mixtral)
}
LEAVES = {"*": ["LlamaMLP"], "tied_gpt2": ["GPT2MLP"], "mixtral": ["MixtralSparseMoeBlock"]}
NAMED_LEAVES = [{"name_suffixes": [".mlp"]}]
BLOCKS_AS_LEAVES = frozenset()
WIDTHS = [8]  # Mixtral multiplies by rows of 16 bytes
PLAIN_TORCH = False


def logits_of(engine, tokens):
    return engine(input_ids=tokens, use_cache=False).logits
