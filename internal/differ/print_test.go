package differ

import (
	"fmt"
	"go/format"
	"regexp"
	"strings"
)

// goCode returns a Go program over the public API that does the same.
func goCode(p *Program) (string, error) {
	c := &coder{types: map[string]string{}}
	each(p.Ops, func(op *Op) {
		if op.R > 0 {
			c.declare(op)
		}
	})
	var body strings.Builder
	for i := range p.Ops {
		body.WriteString(c.statement(&p.Ops[i]))
	}
	var vars strings.Builder
	for _, name := range c.order {
		fmt.Fprintf(&vars, "var %s %s\n_ = %[1]s\n", name, c.types[name])
	}
	text := strings.NewReplacer("VARS", vars.String(), "STATEMENTS", body.String(), "SOURCE", sourceCode(),
		"SEED", fmt.Sprint(p.Seed), "INDEX", fmt.Sprint(p.Index)).Replace(mainCode)
	out, err := format.Source([]byte(text))
	return string(out), err
}

type coder struct {
	types map[string]string
	order []string
}

// prefixes are how the objects of a kind are named.
var prefixes = map[string][2]string{
	"stream new": {"s", "*stream.Stream"}, "stream default": {"s", "*stream.Stream"}, "event new": {"e", "*stream.Event"}, "make": {"x", "*buf"},
	"pinned new": {"h", "*memory.Pinned[byte]"}, "generator new": {"g", "*rng.Generator"}, "pool new": {"p", "*memory.Pool"},
	"capture": {"x", "*graph.Exec"}, "end": {"x", "*graph.Exec"}, "begin": {"r", "*graph.Recording"}, "raw alloc": {"a", "uint64"},
}

func (c *coder) declare(op *Op) {
	if k, ok := prefixes[op.K]; ok {
		name := fmt.Sprintf("%s%d", k[0], op.R)
		if c.types[name] == "" {
			c.types[name] = k[1]
			c.order = append(c.order, name)
		}
	}
}

var objectNames = regexp.MustCompile(`\b[sexhgpra][0-9]+\b`)

func (c *coder) statement(op *Op) string {
	code := kinds[op.K].code(op)
	for _, name := range objectNames.FindAllString(code, -1) {
		if c.types[name] == "" {
			return fmt.Sprintf("// %d: %s: without %s\n", op.at, op.K, name)
		}
	}
	if strings.Contains(code, "BODY") {
		var body strings.Builder
		for i := range op.Do {
			body.WriteString(c.statement(&op.Do[i]))
		}
		result := "nil"
		if op.Fail {
			result = "errBody"
		}
		code = strings.Replace(code, "BODY", fmt.Sprintf("func() error {\n%sreturn %s\n}", body.String(), result), 1)
	}
	how := "do"
	if op.T == 1 {
		how, code = "onThread", "on := nccl.Issuer(c)\n_ = on\n"+code
	}
	return fmt.Sprintf("%s(%d, %q, func() (err error) {\n%s\n})\n", how, op.at, op.K, code)
}

// sourceCode is the part of the kernels' source that the program compiles.
func sourceCode() string { return "`" + kernelSource.CUDA + "`" }

const mainCode = `// Program INDEX of the seed SEED.
package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var (
	_ = time.Minute
	_ tensor.Tensor
	_ graph.Config
	_ rng.Generator
	calls [8]atomic.Int64
	errBody = errors.New("the body fails")
	one = kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}
)

func main() {
	dev, err := device.Open(0)
	if err != nil {
		panic(err)
	}
	id, err := nccl.NewUniqueID(dev)
	if err != nil {
		panic(err)
	}
	c, err := nccl.NewCommunicator(context.Background(), dev, id, 0, 1, nil)
	if err != nil {
		panic(err)
	}
	on := nccl.Issuer(c)
	m, err := kernel.Compile(dev, &source)
	if err != nil {
		panic(err)
	}
	k := map[string]*kernel.Kernel{}
	for _, d := range source.Kernels {
		if k[d.Name], err = m.Kernel(d.Name); err != nil {
			panic(err)
		}
	}
	mask, err := kernel.NewElementwise("template <typename T> T mask(T x, T y, T a) { return (x & y) ^ a; }", &kernel.ElementwiseConfig{
		Defaults: []kernel.Operand{kernel.Set("a", int32(0))},
		Ints:     func(in, out []int64) { out[0] = in[0]&in[1] ^ in[2] },
	})
	if err != nil {
		panic(err)
	}
	_, _, _ = on, k, mask
VARS
STATEMENTS
	fmt.Println("device:", dev.Sync(context.Background()))
}

// do calls fn and prints what it returns.
func do(at int, what string, fn func() error) {
	defer func() {
		if v := recover(); v != nil {
			fmt.Println(at, what, "panic:", v)
		}
	}()
	fmt.Println(at, what, fn())
}

// onThread is do on another OS thread.
func onThread(at int, what string, fn func() error) {
	if thread == nil {
		thread = make(chan func())
		go func() {
			runtime.LockOSThread()
			for fn := range thread {
				fn()
			}
		}()
	}
	done := make(chan struct{})
	thread <- func() { defer close(done); do(at, what, fn) }
	<-done
}

var thread chan func()

// A buf is device memory.
type buf struct {
	bytes  memory.Slice[byte]
	buffer *memory.Buffer
	close  func() error
}

func makeBuf[T memory.Element](s *stream.Stream, n int) (*buf, error) {
	x, err := memory.Make[T](s, n)
	return &buf{x.AsBytes(), x.Buffer(), x.Close}, err
}

func pattern(seed int64, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(seed + int64(i)*7 + int64(i>>8)*13)
	}
	return p
}

func show(x memory.Slice[byte], s *stream.Stream) error {
	host := make([]byte, x.Len())
	err := x.CopyTo(s, host)
	fmt.Println(host)
	return err
}

// On virtual devices the kernels do nothing: copy their Go functions from
// internal/differ if what they calculate matters.
var source = kernel.Source{
	Name: "differ.cu",
	CUDA: SOURCE,
	Kernels: []kernel.Def{
		{Name: "iota", Params: []kernel.Param{kernel.Pointer, kernel.U32, kernel.U32, kernel.I32}, Go: nothing},
		{Name: "axpb", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.U32, kernel.U32, kernel.I32}, Go: nothing},
		{Name: "swap2", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.I32}, Go: nothing},
		{Name: "total", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.I32}, Go: nothing},
		{Name: "stride", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.I32, kernel.I32}, Go: nothing},
		{Name: "spin", Params: []kernel.Param{kernel.U64}, Go: nothing},
		{Name: "poke", Params: []kernel.Param{kernel.Pointer, kernel.I64}, Go: nothing},
	},
}

func nothing(*kernel.Call) {}
`
