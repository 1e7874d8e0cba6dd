#!/usr/bin/env bash
# Times chorus load beside safetensors and torch.load in PyTorch, copies from pinned memory, and dd.
# Each line is a way, GB/s, and what that is of another one.
#
#   load.sh path/to/chorus gpus bytes folder-on-disk
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
chorus=$1 gpus=$2 bytes=$3 disk=$4
memory=/dev/shm/chorus-load.safetensors file=$disk/chorus-load.safetensors
pickled=/dev/shm/chorus-load.pt
trap 'rm -f "$memory" "$file" "$pickled"' EXIT
python3 "$here/load.py" make "$memory" "$bytes"
size=$(stat -c %s "$memory")
rate() { awk -v b="$size" -v s="$1" 'BEGIN { printf "%.2f", b / s / 1e9 }'; }
part() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", a / b }'; }
line() { printf '%-44s %8s GB/s  %s\n' "$1" "$2" "${3:-}"; }
load() { "$chorus" load -q --json "$@" | awk -F '[:,]' '/gb_per_second/ { printf "%.2f", $2 }'; }

h2d=$(rate "$(python3 "$here/load.py" h2d "$size")")
line "pinned memory to one GPU" "$h2d"
torch=$(rate "$(python3 "$here/load.py" file "$memory" 3)")
one=$(load -g 1 --times 7 "$memory")
line "tmpfs to one GPU, load_file" "$torch"
line "tmpfs to one GPU, chorus" "$one" "$(part "$one" "$h2d") of pinned, $(part "$one" "$torch") x load_file"
python3 "$here/load.py" save "$pickled" "$bytes"
torch=$(rate "$(python3 "$here/load.py" torch "$pickled" 3)")
saved=$(load -g 1 --times 7 "$pickled")
"$chorus" load -q -g 1 --verify "$pickled" >/dev/null
line "tmpfs to one GPU, torch.load of a torch.save file" "$torch"
line "tmpfs to one GPU, chorus of a torch.save file" "$saved" "$(part "$saved" "$one") of safetensors, $(part "$saved" "$torch") x torch.load"
rm -f "$pickled"
for threads in 4 8 12 16 24; do
	line "  with $threads threads" "$(load -g 1 --times 5 --threads "$threads" "$memory")"
done
if [ "$gpus" -gt 1 ]; then
	for plan in own shard:0 shard:1 replicate; do
		all=$(load -g "$gpus" --times 7 --plan "$plan" "$memory")
		line "tmpfs to $gpus GPUs, $plan" "$all" "$(part "$all" "$one") x one GPU"
	done
	for i in $(seq 0 $((gpus - 1))); do
		CUDA_VISIBLE_DEVICES=$i "$chorus" load -q -g 1 --times 7 --json "$memory" >"$disk/chorus-load.$i" &
	done
	wait
	each=$(awk -F '[:,]' '/gb_per_second/ { if (!least || $2 < least) least = $2 } END { printf "%.2f", least }' "$disk"/chorus-load.?)
	rm -f "$disk"/chorus-load.?
	line "tmpfs to $gpus GPUs, each process everything" "$each" "replicate is $(part "$all" "$each") x as fast"
fi
cp "$memory" "$file"
sync "$file"
best=0
for block in 4M 16M 64M; do
	python3 "$here/load.py" cold "$file"
	seconds=$(dd if="$file" of=/dev/null iflag=direct bs=$block 2>&1 | sed -n 's/.* copied, \([0-9.e-]*\) s.*/\1/p')
	dd=$(rate "$seconds")
	line "disk, dd iflag=direct bs=$block" "$dd"
	best=$(awk -v a="$best" -v b="$dd" 'BEGIN { print (a > b) ? a : b }')
done
for engine in direct auto cached; do
	python3 "$here/load.py" cold "$file"
	got=$(load -g 1 --engine $engine "$file")
	line "cold disk to one GPU, engine $engine" "$got" "$(part "$got" "$best") of dd"
done
"$chorus" load -q -g 1 "$file" >/dev/null
line "warm page cache to one GPU" "$(load -g 1 --times 5 "$file")"
"$chorus" load -q -g "$gpus" --plan shard:0 --verify "$memory"
