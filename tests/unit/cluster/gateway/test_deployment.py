"""What a gateway's process loads."""

import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from paceline_testing.tiny_models import save_tiny_model

TEXT = "An oak, an elm;  and\na fir."


@pytest.mark.whole
def test_a_gateway_reads_the_tokenizer_without_torch_and_encodes_as_with_it(tmp_path):
    model = save_tiny_model(tmp_path)
    code = (
        "import sys\n"
        "import cluster.gateway.deployment\nfrom cluster.text.tokenizer import read_tokenizer\n"
        "tokenizer = read_tokenizer(sys.argv[1])\n"
        "print(tokenizer(sys.argv[2]).input_ids)\n"
        "print({'torch', 'numba'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code, str(model), TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    wanted = AutoTokenizer.from_pretrained(model, local_files_only=True)(TEXT).input_ids
    assert done.stdout == f"{wanted}\nset()\n"
    assert done.stderr == ""
