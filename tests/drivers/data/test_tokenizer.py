"""Loading a tokenizer from a model folder."""

import subprocess
import sys

import pytest

from tailrace.drivers.data.encoding import load_tokenizer, text_of
from tailrace.errors import ConfigError


def test_a_loaded_tokenizer_speaks_like_the_saved_one(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "1 + 1"}]
    text = loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<b>u:1 + 1;a:"
    assert loaded.encode("1 + 1") == tokenizer.encode("1 + 1")
    assert loaded.decode(loaded.encode("1 + 1"), skip_special_tokens=True) == "1 + 1"
    assert loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(("cleans", "text"), [(False, "2 . 5 , no"), (True, "2. 5, no")])
def test_text_is_what_the_tokenizer_decodes_without_its_special_tokens(tokenizer, tmp_path, cleans, text):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    loaded.clean_up_tokenization_spaces = cleans
    ids = loaded.encode("2 . 5 , no")
    assert ids[0] == loaded.bos_token_id
    assert text_of(loaded)(ids) == loaded.decode(ids, skip_special_tokens=True) == text


def test_torch_is_not_imported_for_the_data(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    program = (
        "import sys; from pathlib import Path\n"
        "from tailrace.drivers.data.encoding import load_tokenizer\n"
        "import tailrace.drivers.data.open, tailrace.drivers.reward.functions\n"
        f"load_tokenizer(Path({str(tmp_path)!r})); print('torch' in sys.modules)"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == "False"


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path = .*the folder has no tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_a_config_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be read"):
        load_tokenizer(tmp_path)
