#!/usr/bin/env bash
# Measures, on a host with so many GPUs, what Chorus is meant to hold beside NCCL, the loop in C
# and PyTorch, and says for each aim whether it does: how many rows were over it, and the worst.
# The folder is what run.sh has unpacked of make gpu-bins. Parts, all unless some are named:
#
#   tests    the tests of nccl, comm, own kernels and chorus perf, on the GPUs only
#   abort    100 aborts of a 1 GiB all-reduce that runs
#   mixed    a million small operations of all kinds, every element checked (MIXED=operations)
#   eager    small operations one by one beside the loop in C, in one process
#   graph    the same in graphs
#   large    1 MiB to 1 GiB beside the loop in C and torch.distributed
#   own      own all-reduces beside NCCL's default and its symmetric windows
#   parts    own all-gathers, reduce-scatters, broadcasts and all-to-alls
#   tuned    what a tuning chooses beside the fastest single strategy
#   torch    torch.cuda.comm beside PyTorch's
#
# Rows are kept in the folder aims, beside the pack. TURNS=3 is how often programs take turns,
# PART_TIMEOUT the seconds that a part may take, NO_TORCH=1 is for hosts without PyTorch.
#
#   aims.sh path/to/chorus-gpu gpus [part...]
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pack=$(cd "$1" && pwd) gpus=$2
shift 2
chorus=$pack/bin/chorus rows=$pack/aims turns=${TURNS:-3} limit=${PART_TIMEOUT:-180}
moving="all_gather reduce_scatter broadcast alltoall"
mkdir -p "$rows"
export here pack gpus chorus rows limit moving
export CHORUS_REQUIRE_GPU=$gpus NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

# within keeps what a command or a function prints as the rows of a part, and ends it in time.
within() {
	timeout -k 5 "$limit" bash -c 'set -o pipefail; "$@"' - "${@:2}" >"$rows/$1.txt" 2>"$rows/$1.err" </dev/null
	local code=$?
	[ $code = 0 ] || printf 'failed     %s: exit status %d; %s\n' "$1" $code "$(tail -n 1 "$rows/$1.err")"
}

# aim judges a column of rows: its greatest value, the bytes from and to, the rows' names, in words.
aim() {
	awk -v column="$2" -v most="$3" -v smallest="$4" -v largest="$5" -v names="$6" -v words="$7" "$(cat "$here/median.awk" "$here/aims.awk")" "$rows/$1.txt"
}

# passed judges tests: all those of a name have passed on GPUs, and some were run.
passed() {
	awk -v words="$2" '/--- PASS: .*cuda/ { ok++ } /--- FAIL: |^panic: |^FAIL/ { bad++ }
		END { printf "%-10s %s: %d passed, %d failed\n", bad ? "short" : ok ? "holds" : "unmeasured", words, ok, bad }' "$rows/$1.txt"
}

tests() {
	limit=$((4 * limit)) within tests env PACKAGE_TIMEOUT="$limit" "$pack/run.sh" '^(nccl|comm|ddp|internal/fabric|perf)$' -- -test.skip '/virtual|//virtual|/joined|//joined'
	cat "$rows/tests.txt"
}
abort() {
	within abort run_test nccl -test.run 'AbortWhileALargeOperationRuns$/cuda' -test.count 20
	passed abort "aborts of 1 GiB end within 2 s, 5 in each test"
}
mixed() {
	within mixed run_test comm -test.run "MixedOperations\$/cuda/^$gpus\$" -mixed "${MIXED:-1000000}"
	passed mixed "${MIXED:-1000000} mixed operations of $gpus ranks are right"
}
run_test() { (cd "$pack/tests/$1" && ./test -test.v -test.timeout "${limit}s" "${@:2}"); }

# thinnest runs a benchmark of nccl beside the loop in C, and keeps names and ratios.
thinnest() {
	within "$1" beside_c "$2"
	awk '/Chorus\/C/ { for (i = 2; i <= NF; i++) if ($i == "Chorus/C") print $1, $(i - 1) }' "$rows/$1.txt" >"$rows/$1-ratios.txt"
}
beside_c() {
	local cuda=${CUDA_HOME:-/usr/local/cuda} library=-lnccl include=$here
	if [ -n "${CHORUS_LIBNCCL:-}" ]; then library=$CHORUS_LIBNCCL include=$(dirname "$CHORUS_LIBNCCL")/../include; fi
	gcc -O2 -shared -fPIC -I"$cuda/include" -I"$include" "$here/nccl.c" "$library" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcudart -lpthread -o "$rows/libthinnest.so" &&
		run_test nccl -test.run '^$' -test.bench "^Benchmark$1\$/^gpus=$gpus\$" -test.benchtime 15x -thinnest "$rows/libthinnest.so"
}
eager() { thinnest eager BesideThinnest; aim eager-ratios 2 1.05 0 262144 . "small operations one by one, of C's time"; }
graph() { thinnest graph GraphsBesideThinnest; aim graph-ratios 2 1.02 0 262144 . "small operations in graphs, of C's time"; }

large() {
	ITERATIONS=20 within large "$here/collectives.sh" "$chorus" "$gpus" "$turns" 1048576 1073741824 32 0 all_reduce $moving reduce gather scatter sendrecv
	aim large 6 1.0101 0 1e18 . "1 MiB and above with threads, of C's time"
	aim large 7 1.0101 0 1e18 . "1 MiB and above with processes, of C's time"
	aim large 9 1 0 1e18 . "1 MiB and above with processes, of torch.distributed's"
}

# figures prints the names and microseconds of chorus perf with a thread for each GPU.
figures() {
	"$chorus" perf "${@:2}" -g "$gpus" -n 20 -w 5 -G "$1" -c 1 --format bench |
		awk '/^Benchmark/ { sub(/^Benchmark/, "", $1); sub(/-[0-9]+$/, "", $1); print $1, $3 / 1000 }'
}
# of_windows prints what own kernels take of NCCL's time with registered windows.
of_windows() {
	awk 'FNR == 1 { file++ } file == 1 { windows[$1] = $2; next }
		sub("strategy=own/", "", $1) && windows[$1] > 0 { print $1, $2 / windows[$1], $2 / $3 }' "$1" "$2"
}
own() {
	STRATEGIES=1 ITERATIONS=20 within own-small "$here/collectives.sh" "$chorus" "$gpus" "$turns" 8 262144 8 20 all_reduce
	NO_TORCH=1 STRATEGIES=1 ITERATIONS=20 within own-middle "$here/collectives.sh" "$chorus" "$gpus" "$turns" 1048576 4194304 4 20 all_reduce
	STRATEGIES=1 ITERATIONS=500 within own-eager "$here/collectives.sh" "$chorus" "$gpus" "$turns" 8 262144 32 0 all_reduce
	within windows-graph figures 20 all_reduce -R 2 -b 8 -e 4194304 -f 2
	within windows-eager figures 0 all_reduce -R 2 -b 8 -e 262144 -f 32
	cat "$rows/own-small.txt" "$rows/own-middle.txt" >"$rows/own-both.txt"
	of_windows "$rows/windows-graph.txt" "$rows/own-both.txt" >"$rows/own-windows.txt"
	of_windows "$rows/windows-eager.txt" "$rows/own-eager.txt" >"$rows/own-windows-eager.txt"
	local default=0.45 largest=1048576
	if [ "$gpus" = 2 ]; then default=0.55 largest=262144; fi
	aim own-both 6 $default 0 $largest strategy=own "own all-reduces in a graph, threads, of C's time"
	aim own-both 7 $default 0 $largest strategy=own "own all-reduces in a graph, processes, of C's time"
	aim own-both 6 0.65 4194304 4194304 strategy=own "own all-reduces of 4 MiB in a graph, of C's time"
	aim own-windows 2 0.75 0 1048576 . "own all-reduces in a graph, of windows' time"
	aim own-windows 3 1.05 0 4194304 . "own all-reduces in a graph, threads, of processes' time"
	aim own-windows-eager 2 0.9 0 262144 . "own all-reduces one by one, of windows' time"
	aim own-eager 9 0.3 0 262144 strategy=own "own all-reduces one by one, of torch.distributed's"
}
parts() {
	NO_TORCH=1 STRATEGIES=1 ITERATIONS=20 within parts "$here/collectives.sh" "$chorus" "$gpus" "$turns" $((16 * gpus)) 65536 8 20 $moving
	aim parts 6 0.6 0 65536 strategy=own "own $moving in a graph, threads, of C's time"
	aim parts 7 0.6 0 65536 strategy=own "own $moving in a graph, processes, of C's time"
}

# chosen prints what the strategy takes that a tuning chose of the fastest one's time.
chosen() {
	"$chorus" perf all_reduce $moving -g "$gpus" -n 20 -w 5 --strategies --format csv "$@" |
		awk -F , 'NR > 1 { k = $1 "/inplace=" $8 "/bytes=" $3; t = $12; if (!(k in best) || t < best[k]) best[k] = t; if ($16 == "true") mine[k] = t }
			END { for (k in mine) print k, mine[k] / best[k] }'
}
tuned() {
	export CHORUS_TUNING_FILE=$rows/tuning.json
	within tune "$chorus" tune -g "$gpus" -o sum -d float
	within tuned-graph chosen -b 8 -e 1073741824 -f 8 -G 5
	within tuned-eager chosen -b 8 -e 1073741824 -f 8
	unset CHORUS_TUNING_FILE
	aim tuned-graph 2 1.05 0 1e18 . "what is chosen in graphs, of the fastest strategy's time"
	aim tuned-eager 2 1.05 0 1e18 . "what is chosen one by one, of the fastest strategy's time"
}
torch() {
	within torch "$here/torchcomm.sh" "$pack/tests/comm/test" "$gpus" "$turns"
	aim torch 2 30 4096 4096 '^(broadcast|scatter|gather|reduce_add)/' "torch.cuda.comm of 4 KiB, us"
	aim torch 6 1 536870912 536870912 '^(broadcast|scatter|gather|reduce_add)/' "torch.cuda.comm of 512 MiB, of PyTorch's time"
	aim torch 6 0.8334 134217728 134217728 dim1 "torch.cuda.comm along dimension 1, of PyTorch's time"
	aim torch 6 0.1 0 1e18 coalesced "torch.cuda.comm coalesced, of PyTorch's time"
}

export -f run_test beside_c figures chosen

[ $# -gt 0 ] || set -- tests abort mixed eager graph large own parts tuned torch
for part; do
	case $part in
	tests | abort | mixed | eager | graph | large | own | parts | tuned | torch) ;;
	*) echo "aims.sh: there is no part $part" >&2; exit 2 ;;
	esac
done
for part; do
	begun=$SECONDS
	"$part"
	printf '           (%s: %d s)\n' "$part" $((SECONDS - begun))
done
