package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// verifying runs a test against the source compiled for the host and against CUDA. The test
// gets the function that verifies a source.
func verifying(t *testing.T, fn func(t *testing.T, verify func(*kernel.Source, kernel.Trial) error)) {
	run := func(t *testing.T, cfg kernel.VerifyConfig) {
		cfg.Tolerances = map[memory.DType]kernel.Tolerance{memory.Float64: {Abs: 0.25}}
		fn(t, func(src *kernel.Source, tr kernel.Trial) error {
			err := kernel.Verify(testgpu.Context(t), src, []kernel.Trial{tr}, &cfg)
			if errors.Is(err, exec.ErrNotFound) {
				t.Skip(err)
			}
			return err
		})
	}
	t.Parallel()
	t.Run("host", func(t *testing.T) { run(t, kernel.VerifyConfig{Host: true}) })
	t.Run("cuda", func(t *testing.T) { run(t, kernel.VerifyConfig{Device: testgpu.CUDA(t, 1)[0]}) })
}

// addArgs are the arguments of add, which writes sum = x + y and counts its elements in total.
type addArgs struct {
	Sum   memory.Slice[float32]
	X, Y  memory.Slice[float32]
	Total memory.Slice[int32]
	N     int32
}

const addCUDA = `extern "C" __global__ void add(float* sum, const float* x, const float* y, int* total, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i >= n) return;
	sum[i] = x[i] + y[i];
	atomicAdd(total, 1);
}`

// addGo is the right Go function. spoil changes what it has done.
func addGo(spoil func(c *kernel.Call, a addArgs)) func(c *kernel.Call, a addArgs) {
	return func(c *kernel.Call, a addArgs) {
		n := int(a.N)
		sum, x, y := kernel.Data(c, a.Sum.Slice(0, n)), kernel.Data(c, a.X.Slice(0, n)), kernel.Data(c, a.Y.Slice(0, n))
		for i := range sum {
			sum[i] = x[i] + y[i]
		}
		kernel.Data(c, a.Total)[0] += a.N
		spoil(c, a)
	}
}

func addSource(cuda string, spoil func(c *kernel.Call, a addArgs)) *kernel.Source {
	src := &kernel.Source{Name: "add.cu", CUDA: cuda}
	kernel.Define(src, "add", addGo(spoil))
	return src
}

// addTrial adds n numbers into memory for more.
func addTrial(t *testing.T, n, more int) kernel.Trial {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	x, y := make([]float32, n), make([]float32, n)
	for i := range x {
		x[i], y[i] = r.Float32(), r.Float32()
	}
	return kernel.Trial{Kernel: "add", Grid: kernel.Cover(n), Outputs: []string{"sum"},
		Args: []any{make([]float32, n+more), x, y, []int32{100}, int32(n)}}
}

func differenceOf(t *testing.T, err error) *kernel.VerifyError {
	t.Helper()
	var e *kernel.VerifyError
	require.ErrorAs(t, err, &e)
	require.Equal(t, "add", e.Kernel)
	return e
}

func TestVerify(t *testing.T) {
	right := func(*kernel.Call, addArgs) {}
	verifying(t, func(t *testing.T, verify func(*kernel.Source, kernel.Trial) error) {
		for _, n := range []int{1, 1000} {
			tr := addTrial(t, n, 3)
			given := slices.Clone(tr.Args[0].([]float32))
			require.NoError(t, verify(addSource(addCUDA, right), tr))
			require.Equal(t, given, tr.Args[0], "arguments do not change")
		}
		check := func(want kernel.Difference, count int, spoil func(c *kernel.Call, a addArgs)) *kernel.VerifyError {
			t.Helper()
			e := differenceOf(t, verify(addSource(addCUDA, spoil), addTrial(t, 1000, 0)))
			require.Equal(t, count, e.Count)
			require.Equal(t, want.Arg, e.First.Arg)
			require.Equal(t, want.Name, e.First.Name)
			require.Equal(t, want.Index, e.First.Index)
			require.Equal(t, want.Outside, e.First.Outside)
			return e
		}
		e := check(kernel.Difference{Name: "sum", Index: 617}, 1, func(c *kernel.Call, a addArgs) { kernel.Data(c, a.Sum)[617] = 7 })
		require.Equal(t, "7", e.First.Go)
		require.ErrorContains(t, e, fmt.Sprintf("sum[617] is %s in CUDA and 7 in Go", e.First.CUDA))
		e = check(kernel.Difference{Name: "sum", Index: 3}, 2, func(c *kernel.Call, a addArgs) {
			kernel.Data(c, a.Sum)[3] = -1
			kernel.Data(c, a.Sum)[900] = -100
		})
		require.Equal(t, 900, e.Worst.Index)
		require.ErrorContains(t, e, "the worst: sum[900]")
		e = check(kernel.Difference{Arg: 3, Name: "total"}, 1, func(c *kernel.Call, a addArgs) { kernel.Data(c, a.Total)[0]++ })
		require.Equal(t, [2]string{"1100", "1101"}, [2]string{e.First.CUDA, e.First.Go})
		check(kernel.Difference{Arg: 1, Name: "x", Index: 5}, 1, func(c *kernel.Call, a addArgs) { kernel.Data(c, a.X)[5] = 9 }) // const
	})
}

// A write outside of an argument is found on either side, even if it is in the memory of the
// device.
func TestVerifyFindsWritesOutside(t *testing.T) {
	verifying(t, func(t *testing.T, verify func(*kernel.Source, kernel.Trial) error) {
		write := func(offset int) func(*kernel.Call, addArgs) {
			return func(c *kernel.Call, a addArgs) {
				kernel.UpdateAddress[float32](c, c.Address(0)+uint64(4*offset), 1)[0] = 5
			}
		}
		for _, at := range []int{-64, 1000} {
			e := differenceOf(t, verify(addSource(addCUDA, write(at)), addTrial(t, 1000, 0)))
			require.Equal(t, kernel.Difference{Name: "sum", Index: at, Outside: true, CUDA: "untouched", Go: "5"}, e.First)
			require.ErrorContains(t, e, fmt.Sprintf("sum[%d], outside of the argument, is untouched in CUDA and 5 in Go", at))
		}
		off := `extern "C" __global__ void add(float* sum, const float* x, const float* y, int* total, int n) {
			for (int i = 0; i <= n; i++) sum[i] = i < n ? x[i] + y[i] : 6;
			*total += n;
		}`
		tr := addTrial(t, 100, 0)
		tr.Grid = flat(1, 1, 0)
		e := differenceOf(t, verify(addSource(off, func(*kernel.Call, addArgs) {}), tr))
		require.Equal(t, kernel.Difference{Name: "sum", Index: 100, Outside: true, CUDA: "6", Go: "untouched"}, e.First)
		require.Equal(t, 1, e.Count)
		// Also if both do, and outside of scratch memory.
		tr.Scratch = []string{"sum"}
		e = differenceOf(t, verify(addSource(off, write(100)), tr))
		require.Equal(t, kernel.Difference{Name: "sum", Index: 100, Outside: true, CUDA: "6", Go: "5"}, e.First)
		// A write far away is an error of the virtual device.
		err := verify(addSource(addCUDA, write(1<<40)), addTrial(t, 10, 0))
		require.ErrorContains(t, err, "kernel: verify add.cu: trial 0, add: the Go function: ")
	})
}

// An element that one side does not write is found, even if the other side writes the poison.
func TestVerifyFindsUnwrittenElements(t *testing.T) {
	type setArgs struct {
		Out memory.Slice[float32]
		N   int32
	}
	// Writes NaN, 0 and 1 in turn.
	const cuda = `extern "C" __global__ void set(float* out, int n) {
		if (threadIdx.x < n) out[threadIdx.x] = threadIdx.x % 3 == 0 ? __int_as_float(-1) : threadIdx.x % 3 - 1;
	}`
	verifying(t, func(t *testing.T, verify func(*kernel.Source, kernel.Trial) error) {
		for _, skipped := range []int{-1, 3, 4, 5} {
			src := &kernel.Source{Name: "set.cu", CUDA: cuda}
			kernel.Define(src, "set", func(c *kernel.Call, a setArgs) {
				out := kernel.Data(c, a.Out)
				for i := range a.N {
					switch {
					case int(i) == skipped:
					case i%3 == 0:
						out[i] = float32(math.NaN())
					default:
						out[i] = float32(i%3 - 1)
					}
				}
			})
			tr := kernel.Trial{Kernel: "set", Grid: flat(1, 32, 0), Args: []any{make([]float32, 12), int32(9)}, Outputs: []string{"out"}}
			err := verify(src, tr)
			if skipped < 0 {
				require.NoError(t, err, "elements that no side writes are equal")
				continue
			}
			var e *kernel.VerifyError
			require.ErrorAs(t, err, &e)
			require.Equal(t, skipped, e.First.Index)
			require.Equal(t, 1, e.Count)
		}
	})
}

func TestVerifyChecksArguments(t *testing.T) {
	src := addSource(addCUDA, func(*kernel.Call, addArgs) {})
	right := addTrial(t, 4, 0)
	for want, change := range map[string]func(*kernel.Trial){
		"trial 0, sub: the source has no kernel of this name":                     func(tr *kernel.Trial) { tr.Kernel = "sub" },
		"trial 0, add: 4 arguments: want 5":                                       func(tr *kernel.Trial) { tr.Args = tr.Args[:4] },
		"argument 1: a []int for a pointer: want a slice such as []float32":       func(tr *kernel.Trial) { tr.Args[1] = []int{1} },
		"argument 4: a int for an int":                                            func(tr *kernel.Trial) { tr.Args[4] = 4 },
		"argument 4: a int64 for an int":                                          func(tr *kernel.Trial) { tr.Args[4] = int64(4) },
		"argument 4: a <nil> for an int":                                          func(tr *kernel.Trial) { tr.Args[4] = nil },
		"argument 1: a float32 for a pointer":                                     func(tr *kernel.Trial) { tr.Args[1] = float32(1) },
		`argument 1 is memory of int32, but the source declares "const float* x"`: func(tr *kernel.Trial) { tr.Args[1] = []int32{1, 2, 3, 4} },
		`the source declares no pointer "n": it has sum, x, y, total, n`:          func(tr *kernel.Trial) { tr.Outputs = []string{"n"} },
		`the source declares no pointer "z"`:                                      func(tr *kernel.Trial) { tr.Scratch = []string{"z"} },
		"no threads in y: want 1 or more":                                         func(tr *kernel.Trial) { tr.Grid.Threads[1] = 0 },
		"the Go function: ":                                                       func(tr *kernel.Trial) { tr.Args[4] = int32(5) }, // beyond the slices
	} {
		tr := right
		tr.Args = slices.Clone(tr.Args)
		change(&tr)
		err := kernel.Verify(testgpu.Context(t), src, []kernel.Trial{tr}, &kernel.VerifyConfig{Host: true})
		if errors.Is(err, exec.ErrNotFound) {
			t.Skip(err)
		}
		require.ErrorContains(t, err, "kernel: verify add.cu: ")
		require.ErrorContains(t, err, want)
	}
	require.ErrorContains(t, kernel.Verify(testgpu.Context(t), nil, nil, nil), "kernel: verify: no source given")
	require.ErrorContains(t, kernel.Verify(testgpu.Context(t), src, nil, nil), "kernel: verify add.cu: no trials given")
	for i := range 3 {
		empty := right
		empty.Grid.Blocks[i] = 0
		err := kernel.Verify(testgpu.Context(t), src, []kernel.Trial{right, empty}, nil)
		require.ErrorContains(t, err, "trial 1, add: a grid of ")
	}
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	err := kernel.Verify(testgpu.Context(t), src, []kernel.Trial{right}, &kernel.VerifyConfig{Device: devs[0]})
	require.ErrorContains(t, err, "is not a GPU, its backend is virtual: set VerifyConfig.Host to run the source on the host")
	if sys, err := device.Default(); err != nil || sys.Backend() != "cuda" {
		require.ErrorContains(t, kernel.Verify(testgpu.Context(t), src, []kernel.Trial{right}, nil), "set VerifyConfig.Host to run the source on the host")
	}
}

// Structs, null pointers, all kinds of numbers and tolerances pass.
func TestVerifyArgumentTypes(t *testing.T) {
	src := &kernel.Source{Name: "pack.cu", CUDA: `struct Pair { int a; float b; };
extern "C" __global__ void pack(double* out, Pair p, const float* none, bool flag, short s) {
	out[0] = p.a; out[1] = p.b; out[2] = none == 0; out[3] = flag; out[4] = s;
}`, Kernels: []kernel.Def{{
		Name: "pack", Params: []kernel.Param{kernel.Pointer, kernel.Struct(8), kernel.Pointer, kernel.B8, kernel.I16},
		Go: func(c *kernel.Call) {
			b := c.Bytes(1)
			out := kernel.Update[float64](c, 0, 5)
			out[0], out[1] = float64(b[0]), 0.75 // the bound is 0.25
			out[2], out[3], out[4] = 1, 1, float64(kernel.Get[int16](c, 4))
		},
	}}}
	trial := func(b []byte) kernel.Trial {
		return kernel.Trial{Kernel: "pack", Grid: flat(1, 1, 0), Args: []any{make([]float64, 5), b, nil, true, int16(-5)}, Outputs: []string{"out"}}
	}
	verifying(t, func(t *testing.T, verify func(*kernel.Source, kernel.Trial) error) {
		require.NoError(t, verify(src, trial([]byte{9, 0, 0, 0, 0, 0, 0, 0x3f}))) // 0.5
		var e *kernel.VerifyError
		require.ErrorAs(t, verify(src, trial([]byte{9, 0, 0, 0, 0, 0, 0x80, 0x3e})), &e) // 0.25
		require.Equal(t, kernel.Difference{Name: "out", Index: 1, CUDA: "0.25", Go: "0.75", Error: 0.5, Bound: 0.25}, e.First)
	})
}

// Verify ends with its context, and a kernel that waits for itself does not hang.
func TestVerifyEnds(t *testing.T) {
	src := addSource(`extern "C" __global__ void add(float* sum, const float* x, const float* y, int* total, int n) {
	while (*(volatile int*)total != 0) {}
}`, func(*kernel.Call, addArgs) {})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	tr := addTrial(t, 4, 0)
	err := kernel.Verify(ctx, src, []kernel.Trial{tr}, &kernel.VerifyConfig{Host: true})
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip(err)
	}
	require.ErrorIs(t, err, context.DeadlineExceeded)
}
