#!/usr/bin/env bash
# Runs the packed tests of Chorus on this machine, which needs no Go.
#
#   run.sh [FILTER] [-- flags of the test binaries, such as -test.run=Graph]
#
# FILTER is an extended regular expression on package paths. One line for each
# package; the output of failed tests; why tests were skipped. Exits with 1 if
# any package failed. CHORUS_REQUIRE_GPU=n makes tests that need up to n GPUs
# fail instead of skip. PACKAGE_TIMEOUT is the seconds a package may take, 180.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pack=$here/chorus-gpu.tar.xz
if [ -f "$pack" ]; then # beside the pack: unpack it once and go on inside
	if ! [ "$here/chorus-gpu/run.sh" -nt "$pack" ]; then
		rm -rf "$here/chorus-gpu"
		tar -xJf "$pack" -C "$here" 2>/dev/null ||
			python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2])' "$pack" "$here" || exit 2
		touch "$here/chorus-gpu/run.sh"
	fi
	exec "$here/chorus-gpu/run.sh" "$@"
fi

filter=.
if [ $# -gt 0 ] && [ "$1" != -- ]; then
	filter=$1
	shift
fi
[ "${1:-}" = -- ] && shift
limit=${PACKAGE_TIMEOUT:-180}
logs=$here/logs
mkdir -p "$logs"
failed=0 ran=0
export PATH=$here/bin:$PATH

# Prints what failed tests wrote, and unfinished ones: in the output of -test.v a
# line belongs to the test that a "===" line last named.
failures() {
	awk '
		/^=== (RUN|CONT|NAME|PAUSE) / { name = $3; next }
		/^ *--- FAIL: / { printf "--- %s\n%s", $3, out[$3]; delete out[$3]; next }
		/^ *--- (PASS|SKIP): / { delete out[$3]; next }
		/^(FAIL|PASS)$/ { next }
		{ out[name] = out[name] $0 "\n" }
		END { for (n in out) printf "--- %s did not end\n%s", n, out[n] }' "$1" | head -n 300
}

# Prints the last line that each skipped test wrote, less its position.
skips() {
	awk '
		/^=== (RUN|CONT|NAME|PAUSE) / { name = $3; next }
		/^ *--- SKIP: / { s = line[$3]; sub(/^ *[A-Za-z0-9_]+\.go:[0-9]+: /, "", s); print s; next }
		/^ *--- / { next }
		{ if ($0 ~ /\.go:[0-9]+: /) line[name] = $0 }' "$1"
}

while read -r bin; do
	dir=$(dirname "$bin")
	name=${dir#"$here"/tests/}
	log=$logs/${name//\//_}.log
	ran=$((ran + 1))
	start=$(date +%s%N)
	(cd "$dir" && timeout -k 5 $((limit + 15)) ./test -test.v -test.timeout="${limit}s" "$@") >"$log" 2>&1 </dev/null
	code=$?
	took=$(awk -v ns=$(($(date +%s%N) - start)) 'BEGIN { printf "%.1f", ns / 1e9 }')
	count() { grep -cE "^ *--- $1: " "$log"; }
	verdict=ok
	if [ $code -ne 0 ]; then
		verdict=FAIL
		failed=$((failed + 1))
	fi
	printf '%-4s %-24s passed %4d  failed %3d  skipped %3d  %7s s\n' $verdict "$name" "$(count PASS)" "$(count FAIL)" "$(count SKIP)" "$took"
	if [ $code -ne 0 ]; then
		printf '     exit status %d; all of it: %s\n' $code "$log"
		failures "$log" | sed 's/^/     /'
	elif printf '%s\n' "$@" | grep -q -- '-test.bench='; then
		grep -E '^(Benchmark.*[0-9] ns|cpu)' "$log"
	fi
	skips "$log" >>"$logs/skips.$$"
done < <(find "$here/tests" -name test -type f -perm -u+x | sort | while read -r b; do
	d=$(dirname "$b")
	printf '%s\n' "${d#"$here"/tests/}" | grep -qE -- "$filter" && printf '%s\n' "$b"
done)

if [ -s "$logs/skips.$$" ]; then
	echo "Skipped, and why:"
	sort "$logs/skips.$$" | uniq -c | sort -rn | cut -c1-200
fi
rm -f "$logs/skips.$$"
if [ $ran -eq 0 ]; then
	echo "no package matches $filter"
	exit 1
fi
printf '%d packages, %d failed\n' $ran $failed
[ $failed -eq 0 ]
