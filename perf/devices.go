package perf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A DeviceResult is the test of one GPU alone. Bandwidths are in 10^9 bytes a second.
type DeviceResult struct {
	MemoryBytes  int     `json:"memory_bytes"`
	MemoryWrong  int64   `json:"memory_wrong"` // bytes with another value than the one written
	ToGPU        float64 `json:"to_gpu"`       // copies of pinned memory
	FromGPU      float64 `json:"from_gpu"`
	ToWrong      int64   `json:"to_wrong"` // bytes that arrived wrong
	FromWrong    int64   `json:"from_wrong"`
	Product      float64 `json:"product"`       // 10^12 operations a second; 0: not measured
	ProductWrong int     `json:"product_wrong"` // rows that differ from the reference
	Skipped      string  `json:"skipped,omitempty"`
	Hang         string  `json:"hang,omitempty"`  // the part that did not finish
	Error        string  `json:"error,omitempty"` // why the test ended early
}

// devices tests the local devices at the same time, and exchanges the results. It reports whether all devices of the
// group work, so that collectives can follow.
func (c *checker) devices(ctx context.Context, g *comm.Group) bool {
	limited, cancel := c.step(ctx, "devices")
	defer cancel()
	local := make([]DeviceResult, len(c.devs))
	var wg sync.WaitGroup
	for i, d := range c.devs {
		wg.Go(func() { local[i] = c.device(limited, d) })
	}
	wg.Wait()
	all, err := exchange(ctx, c, "devices", local)
	if err != nil {
		c.found(Finding{Kind: Broken, Step: "devices", Reason: err.Error()})
		return false
	}
	c.report.Devices = make([]DeviceResult, c.size)
	for rank := range c.report.Devices {
		c.report.Devices[rank].Hang = "the process"
	}
	for first, list := range all {
		copy(c.report.Devices[first:], list)
	}
	for rank, d := range c.report.Devices {
		if d.Skipped != "" {
			c.skip(fmt.Sprintf("%s: %s", c.report.GPUs[rank], d.Skipped))
		}
	}
	c.found(judgeDevices(c.report.GPUs, c.report.Devices, c.limits())...)
	for _, d := range c.report.Devices {
		if d.Hang != "" || d.Error != "" {
			c.skip("pairs and all-reduce: a device does not work")
			return false
		}
	}
	return ctx.Err() == nil
}

// device tests one device. A call of the driver that hangs does not stop it from returning when ctx ends.
func (c *checker) device(ctx context.Context, d *device.Device) DeviceResult {
	t := &deviceTest{c: c, dev: d}
	t.at("the creation of a stream")
	done := make(chan error, 1)
	go func() { done <- t.run(ctx) }()
	// The test ends by itself when ctx ends, unless the driver hangs. Give it a moment to release its memory.
	select {
	case err := <-done:
		return t.result(err)
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return t.result(err)
	case <-time.After(time.Second):
		return DeviceResult{MemoryBytes: c.cfg.MemoryBytes, Hang: *t.part.Load()}
	}
}

// A deviceTest tests one device.
type deviceTest struct {
	c    *checker
	dev  *device.Device
	s    *stream.Stream
	part atomic.Pointer[string] // what it does now
	r    DeviceResult
}

func (t *deviceTest) at(part string) { t.part.Store(&part) }

// result completes the result of a test that has ended.
func (t *deviceTest) result(err error) DeviceResult {
	t.r.MemoryBytes = t.c.cfg.MemoryBytes
	switch {
	case errors.Is(err, errStep):
		t.r.Hang = *t.part.Load()
	case err != nil:
		t.r.Error = fmt.Sprintf("%s failed: %v", *t.part.Load(), err)
	}
	return t.r
}

func (t *deviceTest) run(ctx context.Context) (err error) {
	if t.s, err = stream.New(t.dev, nil); err != nil {
		return err
	}
	defer func() {
		if err == nil { // closing a stream that hangs would hang, too
			err = t.s.Close()
		}
	}()
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{{"the test of its memory", t.memory}, {"a copy from or to the host", t.copies}, {"a matrix product", t.product}} {
		t.at(part.name)
		if err := part.run(ctx); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
	}
	return nil
}

// sync waits until the stream is idle.
func (t *deviceTest) sync(ctx context.Context) error { return t.s.Sync(ctx) }

// memory writes a pattern to half of the memory, copies it to the other half, and compares both, twice with other
// data.
func (t *deviceTest) memory(ctx context.Context) (err error) {
	half := (t.c.cfg.MemoryBytes + 1) / 2
	x, err := memory.Make[uint8](t.s, 2*half)
	if err != nil {
		return err
	}
	defer func() { err = t.release(err, x.Close) }()
	data, err := t.newData()
	if err != nil {
		return err
	}
	defer func() { err = t.release(err, data.close) }()
	for seed := range uint32(2) {
		if err := data.fill(x.Slice(0, half), half, seed); err != nil {
			return err
		}
		if err := memory.Copy(t.s, x.Slice(half, 2*half), x.Slice(0, half)); err != nil {
			return err
		}
		for i := range 2 {
			wrong, err := data.wrong(ctx, x.Slice(i*half, (i+1)*half), half, seed)
			if err != nil {
				return err
			}
			t.r.MemoryWrong += wrong
		}
	}
	return nil
}

// release frees something unless the test failed: the stream may hang then.
func (t *deviceTest) release(err error, free func() error) error {
	if err != nil {
		return err
	}
	return free()
}

// A byteData fills device memory with bytes, each of which depends on its position, and compares it.
type byteData struct {
	t       *deviceTest
	kernels *dataKernels
	tables  *dataTables
	count   memory.Slice[uint64]
}

func (t *deviceTest) newData() (b *byteData, err error) {
	b = &byteData{t: t}
	if b.kernels, err = newDataKernels(t.dev, 1); err != nil {
		return nil, err
	}
	if b.tables, err = newDataTables(t.s, b.kernels, newPattern(memory.Uint8, moves, 1), 1); err != nil {
		return nil, err
	}
	b.count, err = memory.Make[uint64](t.s, 1)
	return b, err
}

func (b *byteData) fill(x memory.Slice[uint8], n int, seed uint32) error {
	return b.tables.fill(b.t.s, x, n, 0, seed)
}

// wrong returns the number of bytes of x that are not of the data.
func (b *byteData) wrong(ctx context.Context, x memory.Slice[uint8], n int, seed uint32) (int64, error) {
	if err := b.count.Zero(b.t.s); err != nil {
		return 0, err
	}
	if err := b.tables.check(b.t.s, x, piece{n: n, ranks: 1}, seed, b.count); err != nil {
		return 0, err
	}
	if err := b.t.sync(ctx); err != nil {
		return 0, err
	}
	var out [1]uint64
	err := b.count.CopyTo(b.t.s, out[:])
	return int64(out[0]), err
}

// close frees everything, and requires that the stream is idle.
func (b *byteData) close() error {
	return errors.Join(b.count.Close(), b.tables.close(), b.kernels.module.Close())
}

// hostBytes are the bytes at position i on the host.
func (b *byteData) hostBytes(out []byte, seed uint32) {
	for i := range out {
		out[i] = byte(b.tables.pattern.values[codeOf(uint64(i), 0, seed, uint32(b.tables.codes), uint32(b.tables.limit))])
	}
}

// checkedBytes is the part of the host's copies that is compared on the host.
const checkedBytes = 1 << 20

// copies compares data that is copied in both directions, and measures the copies.
func (t *deviceTest) copies(ctx context.Context) (err error) {
	bytes := min(t.c.cfg.MemoryBytes, 64<<20)
	compared := min(bytes, checkedBytes)
	x, err := memory.Make[uint8](t.s, bytes)
	if err != nil {
		return err
	}
	defer func() { err = t.release(err, x.Close) }()
	host, err := memory.MakePinned[uint8](t.dev, bytes)
	if err != nil {
		return err
	}
	defer func() { err = t.release(err, host.Close) }()
	data, err := t.newData()
	if err != nil {
		return err
	}
	defer func() { err = t.release(err, data.close) }()
	const seed = 7
	want := make([]byte, compared)
	data.hostBytes(want, seed)
	copy(host.Data(), want)
	to := func() error { return x.CopyFromPinned(t.s, host) }
	from := func() error { return x.CopyToPinned(t.s, host) }
	if t.r.ToGPU, err = t.bandwidth(ctx, bytes, to); err != nil {
		return err
	}
	if t.r.ToWrong, err = data.wrong(ctx, x.Slice(0, compared), compared, seed); err != nil {
		return err
	}
	if err := data.fill(x.Slice(0, compared), compared, seed); err != nil {
		return err
	}
	if err := t.sync(ctx); err != nil {
		return err
	}
	clear(host.Data())
	if t.r.FromGPU, err = t.bandwidth(ctx, bytes, from); err != nil {
		return err
	}
	got := host.Data()
	for i, b := range want {
		if got[i] != b {
			t.r.FromWrong++
		}
	}
	return nil
}

// bandwidth returns the bandwidth of the fastest of several copies, in 10^9 bytes a second.
func (t *deviceTest) bandwidth(ctx context.Context, bytes int, issue func() error) (float64, error) {
	best, err := fastest(ctx, t.s, t.c.cfg.Iterations, issue)
	return float64(bytes) / max(best.Seconds(), 1e-9) / 1e9, err
}

// HostBandwidth measures copies of pinned memory from and to a device, in 10^9
// bytes a second, and returns when the copies have ended.
func HostBandwidth(ctx context.Context, d *device.Device, bytes int) (toGPU, fromGPU float64, err error) {
	const repeats = 4
	s, err := stream.New(d, nil)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	x, err := memory.Make[uint8](s, bytes)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	host, err := memory.MakePinned[uint8](d, bytes)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	to, err := fastest(ctx, s, repeats, func() error { return x.CopyFromPinned(s, host) })
	if err != nil {
		return 0, 0, err
	}
	from, err := fastest(ctx, s, repeats, func() error { return x.CopyToPinned(s, host) })
	gbs := func(d time.Duration) float64 { return float64(bytes) / max(d.Seconds(), 1e-9) / 1e9 }
	return gbs(to), gbs(from), err
}

// fastest times calls on the device and returns the shortest time.
func fastest(ctx context.Context, s *stream.Stream, n int, issue func() error) (best time.Duration, err error) {
	var marks [2]*stream.Event
	for i := range marks {
		if marks[i], err = stream.NewEvent(s.Device(), &stream.EventConfig{Timing: true}); err != nil {
			return 0, err
		}
		defer func() {
			if err == nil {
				err = marks[i].Close()
			}
		}()
	}
	for i := range n {
		if err := errors.Join(marks[0].Record(s), issue(), marks[1].Record(s)); err != nil {
			return 0, err
		}
		if err := marks[1].Sync(ctx); err != nil {
			return 0, err
		}
		took, err := marks[1].Elapsed(marks[0])
		if err != nil {
			return 0, err
		}
		if i == 0 || took < best {
			best = took
		}
	}
	return best, nil
}

// productSeries is the number of products that are timed together. One takes 30 µs, which is too short for the clock of
// an idle GPU: two healthy GPUs differed by a third.
const productSeries = 100

// product multiplies matrices of small integers, whose product is exact, and compares it with a reference: for a
// vector x of odd integers, (a·b)·x must be a·(b·x). A single wrong element of a row always shows, because x has no
// zero.
func (t *deviceTest) product(ctx context.Context) (err error) {
	n, series := 2048, productSeries
	if !t.c.measured() {
		n, series = 32, 1
	}
	a, b := integers(n, 1), integers(n, 2)
	halfs := func(x []int64) ([]memory.BFloat16Bits, error) {
		out := make([]memory.BFloat16Bits, len(x))
		for i, v := range x {
			out[i] = memory.BFloat16Of(float32(v))
		}
		return out, nil
	}
	var operands [2]memory.Slice[memory.BFloat16Bits]
	for i, values := range [][]int64{a, b} {
		list, err := halfs(values)
		if err != nil {
			return err
		}
		if operands[i], err = memory.MakeFrom(t.s, list); err != nil {
			return err
		}
		defer func() { err = t.release(err, operands[i].Close) }()
	}
	out, err := memory.Make[float32](t.s, n*n)
	if err != nil {
		return err
	}
	defer func() { err = t.release(err, out.Close) }()
	ta, err := tensor.Of(operands[0], n, n)
	if err != nil {
		return err
	}
	tb, err := tensor.Of(operands[1], n, n)
	if err != nil {
		return err
	}
	tc, err := tensor.Of(out, n, n)
	if err != nil {
		return err
	}
	multiply := func() error { return tensor.MatMul(t.s, tc, ta, tb, nil) }
	if err := multiply(); err != nil { // the first product loads the library
		if _, missing := errors.AsType[*dl.Error](err); missing {
			t.r.Skipped = "the matrix product: there is no cuBLASLt"
			return nil
		}
		return err
	}
	best, err := fastest(ctx, t.s, t.c.cfg.Iterations, func() error {
		for range series {
			if err := multiply(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	t.r.Product = 2 * float64(series) * float64(n) * float64(n) * float64(n) / max(best.Seconds(), 1e-9) / 1e12
	got := make([]float32, n*n)
	if err := out.CopyTo(t.s, got); err != nil {
		return err
	}
	t.r.ProductWrong = wrongRows(a, b, got, n)
	return nil
}

// integers returns a matrix of integers from -4 to 4.
func integers(n int, seed uint32) []int64 {
	x := make([]int64, n*n)
	for i := range x {
		x[i] = int64(codeOf(uint64(i), 0, seed, 9, 1)) - 4
	}
	return x
}

// wrongRows returns the number of rows of c that differ from the product of a and b.
func wrongRows(a, b []int64, c []float32, n int) (wrong int) {
	x, bx := make([]int64, n), make([]int64, n)
	for j := range x {
		x[j] = 2*int64(codeOf(uint64(j), 0, 3, 16, 1)) + 1
	}
	for i := range n {
		for j := range n {
			bx[i] += b[i*n+j] * x[j]
		}
	}
	for i := range n {
		want, got := int64(0), 0.0
		for j := range n {
			want += a[i*n+j] * bx[j]
			got += float64(c[i*n+j]) * float64(x[j]) // exact: below 2^53, or the row is wrong anyway
		}
		if got != float64(want) {
			wrong++
		}
	}
	return wrong
}
