"""Converts one GGUF file to a Hugging Face folder that vLLM loads.

`python -m headrace.model.convert GGUF OUT` runs as a process of its own, so that torch and
transformers never load into the CLI and their memory goes back at once. The weights are
dequantised to bfloat16, which holds the GGUF's 4-bit values without a loss.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from headrace.model.registry import ModelError

MAX_THREADS = 4


def convert(gguf: Path, out: Path) -> None:
    """Convert in a child process. ModelError holds the child's last line if it fails."""
    threads = str(min(MAX_THREADS, os.cpu_count() or 1))
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    command = [sys.executable, "-m", "headrace.model.convert", str(gguf), str(out)]
    done = subprocess.run(
        command,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ModelError(
            f"converting {gguf.name} failed ({last}): it needs torch, transformers, accelerate and "
            "gguf, which the extras `cpu` and `gpu` bring"
        )
    if not (out / "chat_template.jinja").is_file():
        raise ModelError(f"{gguf.name} brings no chat template: chat would not work")


def main(gguf: Path, out: Path) -> None:
    """Do the child's work. Imports torch and transformers, so it is called in no other process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    torch.set_num_threads(min(MAX_THREADS, os.cpu_count() or 1))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    config_file = out / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)  # the saved weights are plain bfloat16
    config_file.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
