#!/bin/bash
# gpt2.sh BINARY [FOLDER [STEPS [FLAGS]]]: compares examples/gpt -model gpt2 -bf16 with torch_gpt2.py on
# one GPU, and on two if there are two. FLAGS are for both programs, such as "-batch 16 -micro 8". Both
# read the same tokens. FOLDER gets the tokens and the results in JSON.
set -u
binary=$(realpath "$1") here=$(dirname "$(realpath "$0")") steps=${3:-200} flags=${4:-}
mkdir -p "${2:-gpt2}" && cd "${2:-gpt2}" || exit 1
limit=${LIMIT:-240} # seconds of each part

# Text: 20,000 Markov chains side by side. Three of four tokens are one of four successors of the
# token before, and the others have about Zipf's frequencies.
[ -s tokens.bin ] || timeout "$limit" python3 - <<'PY'
import numpy as np
vocab, chains, length = 50304, 20000, 1000
r = np.random.default_rng(1)
text = np.zeros((chains, length), np.int64)
last = r.integers(0, vocab, chains)
for i in range(length):
    zipf = np.exp(r.random(chains) * np.log(vocab)).astype(np.int64) - 1
    near = (last * 31 + r.integers(0, 4, chains) + 7) % vocab
    text[:, i] = last = np.where(r.random(chains) < 0.75, near, zipf)
text.astype("<u2").tofile("tokens.bin")
PY

peer() { # peer NAME GPUS FLAG: both programs with as many GPUs, and -fsdp or nothing
	export CUDA_VISIBLE_DEVICES=$(seq -s, 0 $(($2 - 1)))
	timeout "$limit" "$binary" -model gpt2 -bf16 -data tokens.bin -steps "$steps" -json "go-$1.json" $flags $3 || echo "gpt $1: status $?"
	local run=python3
	[ "$2" -gt 1 ] && run="torchrun --nproc-per-node $2"
	timeout "$limit" $run "$here/torch_gpt2.py" --data tokens.bin --steps "$steps" --json "torch-$1.json" ${flags//-/--} ${3:+-$3} || echo "torch $1: status $?"
}
rm -f go-*.json torch-*.json
gpus=$(nvidia-smi -L | wc -l)
peer 1 1 ""
if [ "$gpus" -gt 1 ]; then
	peer 2 2 ""
	peer 2-fsdp 2 -fsdp
fi

timeout "$limit" python3 - <<'PY'
import glob, json
print(f"{'GPUs':8} {'program':8} {'tokens/s':>10} {'ms a step':>10} {'peak GB':>8}  largest relative difference of losses")
for name in ("1", "2", "2-fsdp"):
    of = {}
    for program in ("go", "torch"):
        if glob.glob(f"{program}-{name}.json"):
            of[program] = json.load(open(f"{program}-{name}.json"))
    for program, r in of.items():
        row = f"{name:8} {program:8} {r['tokens_per_second']:10.0f} {r['median_seconds'] * 1e3:10.2f} {r['peak_bytes'] / 1e9:8.2f}"
        if program == "torch" and "go" in of:
            row += f"  {max(abs(a - b) / b for a, b in zip(of['go']['losses'], r['losses'])):.1e}"
        print(row)
PY
