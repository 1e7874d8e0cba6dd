package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// standIns are the programs that aims.sh runs, with figures that hold some aims and not others.
var standIns = map[string]string{
	"pack/bin/chorus": `
case "$*" in
tune*) exit 0 ;;
*csv*) echo header
	echo all_reduce,2,8,2,float,sum,-1,false,9,0,0,10.0,11,0,nccl,false
	echo all_reduce,2,8,2,float,sum,-1,false,9,0,0,10.4,11,0,own,true
	echo all_reduce,2,1073741824,2,float,sum,-1,true,9,0,0,30,11,0,nccl,false
	echo all_reduce,2,1073741824,2,float,sum,-1,true,9,0,0,33,11,0,own,true ;;
*"-R 2"*) echo BenchmarkAllReduce/type=float/redop=sum/bytes=8-2 1 5000 ns/op ;;
*"all_gather"*"--strategies"*)
	echo BenchmarkAllGather/type=float/strategy=own/bytes=8-2 1 6000 ns/op
	echo BenchmarkAllGather/type=float/strategy=nccl/bytes=8-2 1 10000 ns/op ;;
*"-b 8 "*"--strategies"*)
	case "$*" in run*) t=4100 ;; *) t=4000 ;; esac
	echo BenchmarkAllReduce/type=float/redop=sum/strategy=own/bytes=8-2 1 $t ns/op
	echo BenchmarkAllReduce/type=float/redop=sum/strategy=own/inplace/bytes=8-2 1 $t ns/op
	echo BenchmarkAllReduce/type=float/redop=sum/strategy=nccl/bytes=8-2 1 10000 ns/op ;;
*"--strategies"*)
	echo BenchmarkAllReduce/type=float/redop=sum/strategy=own/bytes=4194304-2 1 7000 ns/op ;;
*)
	echo BenchmarkAllReduce/type=float/redop=sum/bytes=1048576-2 1 10000 ns/op
	echo BenchmarkAllReduce/type=float/redop=sum/inplace/bytes=1048576-2 1 10200 ns/op ;;
esac`,
	"pack/tests/nccl/test": `
case "$*" in
*GraphsBeside*) echo "BenchmarkGraphsBesideThinnest/gpus=2/op=ncclAllReduce/bytes=8-32 15 1.5 C-us 1.01 Chorus/C" ;;
*Beside*) echo "BenchmarkBesideThinnest/gpus=2/op=ncclAllReduce/bytes=8-32 15 1.08 Chorus/C 1.5 C-us" ;;
*) echo "--- PASS: TestAbortWhileALargeOperationRuns/cuda (1.0s)" ;;
esac`,
	"pack/tests/comm/test": `
case "$*" in
*TorchComm*) echo "BenchmarkTorchComm/gpus=2/broadcast/bytes=4096-32 9 31000 ns/op"
	echo "BenchmarkTorchComm/gpus=2/gather_dim1/bytes=134217728-32 9 80000 ns/op"
	echo "BenchmarkTorchComm/gpus=2/broadcast_coalesced-32 9 5000 ns/op" ;;
*) echo "--- FAIL: TestMixedOperations/cuda/2 (1.0s)"; exit 1 ;;
esac`,
	"pack/run.sh": `echo "ok   nccl passed 1 $*"`,
	"bin/gcc": `
while [ $# -gt 0 ]; do [ "$1" = -o ] && o=$2; shift; done
cat >"$o" <<'X'
#!/bin/sh
for b in 8 1048576 4194304; do
	for side in "" /inplace; do printf 'AllReduce/type=float/redop=sum%s/bytes=%d\t10\n' "$side" $b; done
done
printf 'AllGather/type=float/bytes=8\t10\n'
X
chmod +x "$o"`,
	"bin/torchrun": `printf 'AllReduce/type=float/redop=sum/inplace/bytes=%d\t10.3\n' 8 1048576`,
	"bin/python3":  `printf 'broadcast/bytes=4096\t60\ngather_dim1/bytes=134217728\t100\nbroadcast_coalesced\t40\n'`,
}

// aims.sh finds in what programs print which aims are held.
func TestAims(t *testing.T) {
	for _, needed := range []string{"bash", "awk", "timeout"} {
		if _, err := exec.LookPath(needed); err != nil {
			t.Skipf("needs %s", needed)
		}
	}
	folder := t.TempDir()
	for name, text := range standIns {
		path := filepath.Join(folder, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/bash\n"+text+"\n"), 0o755))
	}
	aims := func(parts ...string) (string, error) {
		cmd := exec.Command("testdata/aims.sh", append([]string{filepath.Join(folder, "pack"), "2"}, parts...)...)
		cmd.Env = append(os.Environ(), "PATH="+filepath.Join(folder, "bin")+":"+os.Getenv("PATH"), "TURNS=1", "MIXED=7")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := aims()
	require.NoError(t, err, out)
	for _, want := range strings.Split(strings.TrimSpace(`
ok   nccl passed 1 ^(nccl|comm|ddp|internal/fabric|perf)$ -- -test.skip /virtual|//virtual|/joined|//joined
holds      aborts of 1 GiB end within 2 s, 5 in each test: 1 passed, 0 failed
failed     mixed: exit status 1; 
short      7 mixed operations of 2 ranks are right: 0 passed, 1 failed
short      small operations one by one, of C's time: 1 rows, 1 over 1.05, median 1.080, worst 1.080 (BenchmarkBesideThinnest/gpus=2/op=ncclAllReduce/bytes=8-32)
holds      small operations in graphs, of C's time: 1 rows, 0 over 1.02, median 1.010, worst 1.010 (BenchmarkGraphsBesideThinnest/gpus=2/op=ncclAllReduce/bytes=8-32)
short      1 MiB and above with threads, of C's time: 2 rows, 1 over 1.0101, median 1.000, worst 1.020 (AllReduce/type=float/redop=sum/inplace/bytes=1048576)
short      1 MiB and above with processes, of C's time: 2 rows, 1 over 1.0101, median 1.000, worst 1.020 (AllReduce/type=float/redop=sum/inplace/bytes=1048576)
holds      1 MiB and above with processes, of torch.distributed's: 1 rows, 0 over 1, median 0.990, worst 0.990 (AllReduce/type=float/redop=sum/inplace/bytes=1048576)
holds      own all-reduces in a graph, threads, of C's time: 2 rows, 0 over 0.55, median 0.400, worst 0.400 (AllReduce/type=float/redop=sum/strategy=own/bytes=8)
holds      own all-reduces in a graph, processes, of C's time: 2 rows, 0 over 0.55, median 0.410, worst 0.410 (AllReduce/type=float/redop=sum/strategy=own/bytes=8)
short      own all-reduces of 4 MiB in a graph, of C's time: 1 rows, 1 over 0.65, median 0.700, worst 0.700 (AllReduce/type=float/redop=sum/strategy=own/bytes=4194304)
short      own all-reduces in a graph, of windows' time: 1 rows, 1 over 0.75, median 0.800, worst 0.800 (AllReduce/type=float/redop=sum/bytes=8)
holds      own all-reduces one by one, of windows' time: 1 rows, 0 over 0.9, median 0.800, worst 0.800 (AllReduce/type=float/redop=sum/bytes=8)
short      own all-reduces one by one, of torch.distributed's: 1 rows, 1 over 0.3, median 0.398, worst 0.398 (AllReduce/type=float/redop=sum/strategy=own/inplace/bytes=8)
holds      own all_gather reduce_scatter broadcast alltoall in a graph, threads, of C's time: 1 rows, 0 over 0.6, median 0.600, worst 0.600 (AllGather/type=float/strategy=own/bytes=8)
short      what is chosen in graphs, of the fastest strategy's time: 2 rows, 1 over 1.05, median 1.040, worst 1.100 (all_reduce/inplace=true/bytes=1073741824)
short      torch.cuda.comm of 4 KiB, us: 1 rows, 1 over 30, median 31.000, worst 31.000 (broadcast/bytes=4096)
unmeasured torch.cuda.comm of 512 MiB, of PyTorch's time: want at most 1
holds      torch.cuda.comm along dimension 1, of PyTorch's time: 1 rows, 0 over 0.8334, median 0.800, worst 0.800 (gather_dim1/bytes=134217728)
short      torch.cuda.comm coalesced, of PyTorch's time: 1 rows, 1 over 0.1, median 0.125, worst 0.125 (broadcast_coalesced)`), "\n") {
		require.Contains(t, out, want+"\n")
	}
	out, err = aims("own", "none")
	require.Error(t, err)
	require.Equal(t, "aims.sh: there is no part none\n", out)
}
