"""Costs and savings of each codec: ``python -m benchmarks.kvcodec [--json FILE]``.

Errors come from a real model's KV over three texts (see `model`), speeds from one core over more
bytes than the caches hold (see `speed`), in GB/s of the engine's bytes.

Figures of CODEC = fp8, int4, int4_64 (groups of 64), and lossless where they apply:
    CODEC.ratio, CODEC.encode_gb_s, CODEC.decode_gb_s: lossless is the compressor that would load
        fastest from the disk;
    CODEC.decode_vs_memcpy: decoding against a plain copy of the same bytes;
    CODEC.breakeven_gb_s: D (1 - 1/r), the bandwidth of a medium from which raw bytes load as fast,
        where one core first waits for the bytes and then decodes them;
    CODEC.k_rms, .v_rms, .attention_rms, .kl, .top1: K and V errors by their RMS, the attention
        output's, the next token's divergence and agreement; of int4 with its window
        kept, and without one under the same names + "_no_window";
    CODEC.encode_gb_s.ORDER, CODEC.decode_gb_s.ORDER: 8 heads of 128 channels in a GPU's orders;
    int4.k_rms_per_token: K's error if keys were quantised as values are;
    lossless.entropy_ratio: what no coder of single bytes can exceed; lossless.NAME.*: each tried;
    memcpy_gb_s, disk_gb_s: the bandwidths to beat.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.kvcodec import lossless
from benchmarks.kvcodec.model import BLOCK_TOKENS, CONTEXT, Model, block_bytes, shape_of, texts
from benchmarks.kvcodec.quality import errors, keys_as_values_rms
from benchmarks.kvcodec.speed import codec_speeds, disk_gb_s
from headrace_kvstore.codec import Codec, Fp8, Int4, LayerShape, Order, Raw

DEFAULT_MODEL = Path("~/.cache/headrace/models/smollm2-135m-instruct").expanduser()
CODECS: dict[str, Codec] = {"fp8": Fp8(), "int4": Int4(), "int4_64": Int4(group=64)}
GPU_ORDERS = (Order.HND, Order.NHD)


def measure(folder: Path, rounds: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    model = Model(folder)
    read = [model.read(text) for text in texts().values()]
    if errors(read, Raw(), 0)["kl"] != 0.0:
        raise RuntimeError("the exact cache does not give the exact logits")
    shape = shape_of(read[0].layers[0])
    for name, codec in CODECS.items():
        figures[f"{name}.ratio"] = shape.layer_bytes / codec.stored_bytes(shape)
        for error, value in errors(read, codec, codec.window_tokens).items():
            figures[f"{name}.{error}"] = value
        if codec.window_tokens:
            bare = errors(read, codec, 0)
            figures |= {f"{name}.{error}_no_window": bare[error] for error in bare}
    figures["int4.k_rms_per_token"] = keys_as_values_rms(read, CODECS["int4"])

    speeds = codec_speeds(CODECS, shape, rounds)
    for name, arms in speeds.items():
        figures[f"{name}.encode_gb_s"] = arms["encode_gb_s"]
        figures[f"{name}.decode_gb_s"] = arms["decode_gb_s"]
        figures[f"{name}.decode_vs_memcpy"] = arms["decode_gb_s"] / arms["copy_gb_s"]
    figures["memcpy_gb_s"] = speeds["fp8"]["copy_gb_s"]
    for order in GPU_ORDERS:
        wide = LayerShape(8, BLOCK_TOKENS, 128, "bfloat16", order)
        for name, arms in codec_speeds({"fp8": Fp8(), "int4": Int4()}, wide, rounds).items():
            figures[f"{name}.encode_gb_s.{order}"] = arms["encode_gb_s"]
            figures[f"{name}.decode_gb_s.{order}"] = arms["decode_gb_s"]
    figures["disk_gb_s"] = disk_gb_s(rounds)

    layers = [
        block_bytes(layer, block)
        for text in read
        for layer in text.layers
        for block in range(CONTEXT // BLOCK_TOKENS)
    ]
    figures["lossless.entropy_ratio"] = lossless.entropy_ratio(layers)
    packed = lossless.measure(layers)
    figures |= {f"lossless.{name}": value for name, value in packed.items()}

    def load_s_per_gb(name: str) -> float:
        transfer = 1 / (packed[f"{name}.ratio"] * figures["disk_gb_s"])
        return transfer + 1 / packed[f"{name}.decode_gb_s"]

    best = min(lossless.CODECS, key=load_s_per_gb)
    for figure in ("ratio", "encode_gb_s", "decode_gb_s"):
        figures[f"lossless.{figure}"] = packed[f"{best}.{figure}"]
    memcpy = figures["memcpy_gb_s"]
    figures["lossless.decode_vs_memcpy"] = figures["lossless.decode_gb_s"] / memcpy
    for name in (*CODECS, "lossless"):
        saved = 1 - 1 / figures[f"{name}.ratio"]
        figures[f"{name}.breakeven_gb_s"] = figures[f"{name}.decode_gb_s"] * saved
    return figures


def table(figures: dict[str, float]) -> str:
    """One row a codec, in Markdown."""
    columns = {
        "ratio": "{:.2f}",
        "encode_gb_s": "{:.1f}",
        "decode_gb_s": "{:.1f}",
        "decode_vs_memcpy": "{:.2f}",
        "breakeven_gb_s": "{:.2f}",
        "k_rms": "{:.4f}",
        "v_rms": "{:.4f}",
        "attention_rms": "{:.4f}",
        "kl": "{:.5f}",
        "top1": "{:.3f}",
    }
    lines = ["| codec | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in (*CODECS, "lossless"):
        cells = [
            style.format(figures[f"{name}.{column}"]) if f"{name}.{column}" in figures else "exact"
            for column, style in columns.items()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    copy, disk = figures["memcpy_gb_s"], figures["disk_gb_s"]
    lines += ["", f"A plain copy moves {copy:.1f} GB/s, the disk {disk:.2f} GB/s."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What each codec costs and saves.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures = measure(args.model, args.rounds)
    print(table(figures))
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
