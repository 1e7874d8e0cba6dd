package cudacc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/safe"
)

const source = `
template <class T> __device__ T twice(T x) { return 2 * x; }

extern "C" __global__ void where(unsigned* out, int n) {
	const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
	const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
	out[block * blockDim.x * blockDim.y * blockDim.z + thread] = twice(block * 100 + thread) + n;
}

extern "C" __global__ void reversed(int* x) {
	__shared__ int all[64];
	all[threadIdx.x] = x[threadIdx.x];
	if (threadIdx.x >= 60) return; // the barrier does not wait for these
	__syncthreads();
	if (threadIdx.x < 60) x[threadIdx.x] = all[59 - threadIdx.x];
}

// A sum by lanes 0 to 7 only, the neighbour's value, and votes.
extern "C" __global__ void warps(int* x, int* next, unsigned* votes) {
	const int lane = threadIdx.x % 32;
	int v = x[threadIdx.x];
	next[threadIdx.x] = __shfl_down_sync(0xffffffff, v, 1) - __shfl_up_sync(0xffffffff, v, 1) + __shfl_sync(0xffffffff, v, 3, 8);
	if (lane < 8) {
		for (int by = 4; by > 0; by /= 2) v += __shfl_xor_sync(0xff, v, by);
		x[threadIdx.x] = v;
	} else
		x[threadIdx.x] = __all_sync(0xffffff00, lane > 7) + 10 * __any_sync(0xffffff00, lane == 3);
	votes[threadIdx.x] = __ballot_sync(0xffffffff, lane % 3 == 0);
}

extern "C" __global__ void dynamic(int* out) {
	extern __shared__ __align__(16) unsigned char bytes[];
	bytes[threadIdx.x] = threadIdx.x;
	__syncthreads();
	atomicAdd(out, bytes[blockDim.x - 1 - threadIdx.x]);
}

// The lanes with the same value, and counters that wrap around. The program itself has a function of this name.
extern "C" __global__ void start(unsigned* peers, unsigned* up, unsigned* down, int* wrapped) {
	peers[threadIdx.x] = __match_any_sync(0xffffffff, peers[threadIdx.x]);
	atomicInc(up, 2);
	atomicDec(down, 2);
	if (*wrapped + 1 < *wrapped) *wrapped += 1;
}

extern "C" __global__ void apart(int* x) {
	if (threadIdx.x == 0) __shfl_sync(0xffffffff, 1, 0);
	else __syncthreads();
}

extern "C" __global__ void endless(volatile int* x) { while (*x == 0) {} }

extern "C" __global__ void numbers(double* out, char a, short b, float c, unsigned long long d, const int* none) {
	*out = a + b + c + d + (none == nullptr ? FACTOR : 0);
}
`

func compile(t *testing.T) *HostProgram {
	t.Helper()
	p, err := CompileHost(t.Context(), source, []string{"--use_fast_math", "-D", "FACTOR=1000", "--std=c++17"},
		[]string{"where", "reversed", "warps", "start", "dynamic", "apart", "endless", "numbers"})
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	// Nothing is left when the process ends.
	file, err := os.Readlink(p.Path)
	require.NoError(t, err)
	_, err = os.Stat(filepath.Dir(file))
	require.ErrorIs(t, err, os.ErrNotExist)
	return p
}

func words(xs ...int32) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, xs)
	if err != nil {
		panic(err)
	}
	return b
}

func numbersOf(b []byte) []int32 {
	xs := make([]int32, len(b)/4)
	if _, err := binary.Decode(b, binary.LittleEndian, xs); err != nil {
		panic(err)
	}
	return xs
}

func line(n int) [3]uint32 { return [3]uint32{uint32(n), 1, 1} }

func TestRun(t *testing.T) {
	p := compile(t)
	run := func(kernel string, blocks, threads [3]uint32, shared uint32, args ...HostArg) {
		t.Helper()
		require.NoError(t, p.Run(t.Context(), kernel, blocks, threads, shared, args))
	}
	out := make([]byte, 8+4*24*12+8)
	run("where", [3]uint32{2, 3, 4}, [3]uint32{3, 2, 2}, 0, HostArg{Memory: out, Before: 8}, HostArg{Value: words(7)})
	for i, x := range numbersOf(out[8 : len(out)-8]) {
		require.Equal(t, int32(2*(i/12*100+i%12)+7), x, "thread %d", i)
	}
	require.Equal(t, make([]byte, 8), out[:8])
	require.Equal(t, make([]byte, 8), out[len(out)-8:])

	xs := make([]int32, 64)
	for i := range xs {
		xs[i] = int32(i * i)
	}
	x := words(xs...)
	run("reversed", line(1), line(64), 0, HostArg{Memory: x})
	for i, got := range numbersOf(x) {
		want := xs[i]
		if i < 60 {
			want = xs[59-i]
		}
		require.Equal(t, want, got)
	}

	sum := words(5)
	run("dynamic", line(3), line(100), 100, HostArg{Memory: sum})
	require.Equal(t, []int32{5 + 3*99*50}, numbersOf(sum))

	double := make([]byte, 8)
	run("numbers", line(1), line(1), 0, HostArg{Memory: double}, HostArg{Value: []byte{0xfe}}, HostArg{Value: []byte{0, 1}},
		HostArg{Value: []byte{0, 0, 0, 0x3f}}, HostArg{Value: []byte{1, 0, 0, 0, 0, 0, 0, 0}}, HostArg{Null: true})
	var got float64
	_, err := binary.Decode(double, binary.LittleEndian, &got)
	require.NoError(t, err)
	require.Equal(t, -2+256+0.5+1+1000, got)
}

// Lanes of different masks exchange values independently.
func TestWarps(t *testing.T) {
	p := compile(t)
	xs := make([]int32, 64)
	for i := range xs {
		xs[i] = int32(i*i + 1)
	}
	x, next, votes := words(xs...), make([]byte, 4*64), make([]byte, 4*64)
	require.NoError(t, p.Run(t.Context(), "warps", line(1), line(64), 0, []HostArg{{Memory: x}, {Memory: next}, {Memory: votes}}))
	for i, got := range numbersOf(next) {
		down, up := min(i%32+1, 31)+i/32*32, max(i%32-1, 0)+i/32*32
		require.Equal(t, xs[down]-xs[up]+xs[i/8*8+3], got, "lane %d", i)
	}
	for i, got := range numbersOf(x) {
		want := int32(1)
		if i%32 < 8 {
			want = 0
			for _, v := range xs[i/32*32:][:8] {
				want += v
			}
		}
		require.Equal(t, want, got, "lane %d", i)
	}
	for _, got := range numbersOf(votes) {
		require.Equal(t, int32(0x49249249), got)
	}
}

func TestPeersAndCounters(t *testing.T) {
	p := compile(t)
	peers, up, down, wrapped := words(5, 7, 5, 5, 7), words(0), words(0), words(math.MaxInt32)
	require.NoError(t, p.Run(t.Context(), "start", line(1), line(5), 0, []HostArg{{Memory: peers}, {Memory: up}, {Memory: down}, {Memory: wrapped}}))
	require.Equal(t, []int32{0b01101, 0b10010, 0b01101, 0b01101, 0b10010}, numbersOf(peers))
	require.Equal(t, words(2), up, "0 1 2 0 1 2")
	require.Equal(t, words(1), down, "0 2 1 0 2 1")
	require.Equal(t, words(math.MinInt32), wrapped, "integers wrap around")
}

func TestRunFails(t *testing.T) {
	p := compile(t)
	err := p.Run(t.Context(), "apart", line(1), line(32), 0, []HostArg{{Memory: words(0)}})
	require.ErrorContains(t, err, "32 threads of block (0, 0, 0) wait for threads that do not come to the same barrier or warp exchange")
	require.ErrorContains(t, p.Run(t.Context(), "nothing", line(1), line(1), 0, nil), "the program has no kernel nothing")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Run(ctx, "endless", line(1), line(1), 0, []HostArg{{Memory: words(0)}}), context.DeadlineExceeded)
	p.Seconds = 1
	require.ErrorIs(t, p.Run(t.Context(), "endless", line(1), line(1), 0, []HostArg{{Memory: words(0)}}), ErrProcessorTime)
	_, err = CompileHost(t.Context(), "\n#include <cuda_fp16.h>\n", nil, nil)
	require.ErrorContains(t, err, "source:2")
	require.ErrorContains(t, err, "cuda_fp16.h")
}

// A kernel that spins ends soon after the program that runs it was killed, also if that was before the kernel's
// program began.
func TestKernelEndsWithItsParent(t *testing.T) {
	p := compile(t)
	in := append(words(int32(len("endless"))), "endless"...)
	in = append(in, words(1, 1, 1, 1, 1, 1, 0)...)
	in = append(in, words(4, 0, 0, 0, 0, 0, 0)...) // 4 bytes of memory, which are 0
	file := filepath.Join(t.TempDir(), "in")
	require.NoError(t, os.WriteFile(file, in, 0o600))
	for script, spins := range map[string]bool{
		`"$0" $$ < "$1" & echo $!; wait`: true,
		`parent=$$; (while [ -d /proc/$parent ]; do sleep 0.01; done; exec "$0" $parent < "$1") & echo $!; wait`: false,
	} {
		parent := exec.Command("sh", "-c", script, p.Path, file)
		out, err := parent.StdoutPipe() // of both programs
		require.NoError(t, err)
		require.NoError(t, parent.Start())
		var pid int
		_, err = fmt.Fscan(out, &pid)
		require.NoError(t, err)
		if spins {
			require.Eventually(t, func() bool { // the kernel spins
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				require.NoError(t, err)
				program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
				require.NoError(t, err)
				return strings.Contains(program, "/host") && strings.Fields(string(stat))[13] != "0"
			}, time.Minute, time.Millisecond)
		}
		require.NoError(t, parent.Process.Kill())
		state, err := parent.Process.Wait()
		require.NoError(t, err)
		require.Equal(t, -1, state.ExitCode())
		require.NoError(t, out.(*os.File).SetReadDeadline(time.Now().Add(2*time.Minute)))
		if _, err = io.ReadAll(out); err != nil { // ends when no program has it any more
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		require.NoError(t, err, script)
	}
}

// A program is built once for each key, and works when the store has it.
func TestStored(t *testing.T) {
	t.Setenv(env.KernelCache.Name, t.TempDir())
	k, err := HostKey()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip(err)
	}
	require.NoError(t, err)
	key, built := k.Sum(), 0
	for i, at := range []string{key, key, safe.NewKey(key).Sum()} {
		p, err := StoredHostProgram(at, func() (*HostProgram, error) {
			built++
			return BuildHost(t.Context(), fmt.Sprintf("int main() { return %d; }", 3+i))
		})
		require.NoError(t, err)
		err = exec.Command(p.Path).Run()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, []int{3, 3, 5}[i], exit.ExitCode())
		require.NoError(t, p.Close())
	}
	require.Equal(t, 2, built)
	_, err = StoredHostProgram("other", func() (*HostProgram, error) { return BuildHost(t.Context(), "int main(") })
	require.ErrorContains(t, err, "expected")
	_, found := safe.UserStore().Load("other")
	require.False(t, found)
}
