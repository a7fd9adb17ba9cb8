"""Tiny models of Hugging Face with random weights, made from their configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Net, below, example, floats

WORDS = below(19, 6, start=1)
"""Words without the padding: no ONNX file says that the embedding of padding is not trained."""

NEXT: dict[str, Any] = {"words": WORDS, "labels": below(19, 6)}

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def causal(config: Any) -> nn.Module:
    """A module that gives [batch, classes, length] for words."""
    model = transformers.AutoModelForCausalLM.from_config(config)

    def formula(net: Net, words: Tensor) -> Tensor:
        found: Tensor = net.model(words, attention_mask=torch.ones_like(words), use_cache=False).logits
        return found.transpose(1, 2)

    return Net(formula, model=model)


@example("SoftmaxCrossEntropyLoss", opset=18, **NEXT)
def hf_llama() -> nn.Module:
    more = {"vocab_size": 19, "num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": True}
    return causal(transformers.LlamaConfig(**SMALL, **more))


@example("SoftmaxCrossEntropyLoss", opset=20, **NEXT)
def hf_qwen3() -> nn.Module:
    more = {"vocab_size": 19, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16}
    return causal(transformers.Qwen3Config(**SMALL, **more))


@example("SoftmaxCrossEntropyLoss", opset=21, **NEXT)
def hf_gpt2() -> nn.Module:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 19, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return causal(transformers.GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=2))


@example("SoftmaxCrossEntropyLoss", opset=22, words=WORDS, labels=below(3))
def hf_bert() -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=19, max_position_embeddings=16, num_labels=3, **SMALL, **still)
    model = transformers.BertForSequenceClassification(config)
    return Net(lambda net, words: net.model(words, torch.ones_like(words)).logits, model=model)


@example(opset=23, words=WORDS, y=below(19, 6))
def hf_distilbert() -> nn.Module:
    """Words that are hidden are guessed. All others have the label -100."""
    still = {"dropout": 0.0, "attention_dropout": 0.0}
    config = transformers.DistilBertConfig(
        vocab_size=19, max_position_embeddings=16, dim=8, n_layers=2, n_heads=2, hidden_dim=12, **still
    )

    def formula(net: Net, words: Tensor, y: Tensor) -> Tensor:
        found = net.model(words, torch.ones_like(words)).logits
        return F.cross_entropy(found.flatten(0, 1), torch.where(y < 6, y, -100).flatten())

    return Net(formula, model=transformers.DistilBertForMaskedLM(config))


@example("SoftmaxCrossEntropyLoss", opset=24, x=floats(3, 8, 8), labels=below(3))
def hf_vit() -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL, **still)
    return Net(lambda net, x: net.model(x).logits, model=transformers.ViTForImageClassification(config))


FIXED = "!*encoder.embed_positions.*"


@example("SoftmaxCrossEntropyLoss", opset=19, train={"default": FIXED, "old": FIXED}, sound=floats(4, 12), **NEXT)
def hf_whisper() -> nn.Module:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "num_mel_bins": 4}
    places = {"max_source_positions": 6, "max_target_positions": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(vocab_size=19, dropout=0.0, **layers, **sizes, **places, **tokens)
    model = transformers.WhisperForConditionalGeneration(config)

    def formula(net: Net, sound: Tensor, words: Tensor) -> Tensor:
        given = {"decoder_input_ids": words, "decoder_attention_mask": torch.ones_like(words)}
        found: Tensor = net.model(input_features=sound, **given, use_cache=False).logits
        return found.transpose(1, 2)

    return Net(formula, model=model)


@example("SoftmaxCrossEntropyLoss", opset=25, source=below(19, 5, start=1), **NEXT)
def hf_t5() -> nn.Module:
    """With its plain attention: PyTorch does not export the other one for batches of any size."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=19, dropout_rate=0.0, **sizes)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager")

    def formula(net: Net, source: Tensor, words: Tensor) -> Tensor:
        found: Tensor = net.model(input_ids=source, decoder_input_ids=words, use_cache=False).logits
        return found.transpose(1, 2)

    return Net(formula, model=model)
