"""What the tests share: the scripts as modules, a folder of GLUE files, a tiny RoBERTa."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from common import TOY_WORDS, contrast_flags, parse, shared_flags  # noqa: E402


def load_script(name):
    """Imports "03_acl_grad" and the like, whose names no import statement takes."""
    spec = importlib.util.spec_from_file_location("script_" + name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """settings("--limit", "17", angle=90.0) → args as a script would have them, on the CPU in float32."""
    def make(*flags, **own):
        monkeypatch.setattr(sys, "argv", ["script.py", "--device", "cpu", "--precision", "fp32", "--out", str(tmp_path),
                                          "--fresh", *flags])
        parser = shared_flags("test")
        contrast_flags(parser)
        args = parse(parser)
        vars(args).update(own)
        return args
    return make


@pytest.fixture(scope="session")
def glue_dir():
    """Real GLUE files: the environment variable GLUE_DIR, or a folder shared/glue beside the repository."""
    folder = Path(os.environ.get("GLUE_DIR", ROOT.parent / "shared" / "glue"))
    if not (folder / "RTE").is_dir():
        pytest.skip("no GLUE files here (set GLUE_DIR)")
    return folder


@pytest.fixture(scope="session")
def roberta_dir(tmp_path_factory):
    """A random RoBERTa of three layers, saved in half precision: pad id 1, no token types."""
    folder = tmp_path_factory.mktemp("roberta")
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *TOY_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", cls_token="<s>", pad_token="<pad>", eos_token="</s>",
        sep_token="</s>", unk_token="<unk>", model_max_length=40,
        model_input_names=["input_ids", "attention_mask"]).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=42, type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    transformers.RobertaModel(config, add_pooling_layer=False).half().save_pretrained(folder)
    return folder
