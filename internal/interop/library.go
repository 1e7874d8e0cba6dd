//go:build cgo

package main

// #include <stdint.h>
import "C"

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

var (
	ctx   = context.Background()
	group *comm.Group
)

// failed prints an error and returns how a function failed.
func failed(err error) bool {
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
	}
	return err != nil
}

// chorus_open opens all GPUs and returns their number, or -1.
//
//export chorus_open
func chorus_open() C.int {
	g, err := comm.Local(ctx, nil, nil)
	if failed(err) {
		return -1
	}
	group = g
	return C.int(g.Locals())
}

// chorus_stream returns the CUstream of a GPU.
//
//export chorus_stream
func chorus_stream(gpu C.int) C.uintptr_t { return C.uintptr_t(group.Stream(int(gpu)).Handle()) }

func pack(managed unsafe.Pointer, unversioned C.int) tensor.DLPack {
	return tensor.DLPack{Managed: managed, Unversioned: unversioned != 0}
}

// chorus_double takes a tensor over, doubles its elements, and returns its address.
//
//export chorus_double
func chorus_double(gpu C.int, managed unsafe.Pointer, unversioned C.int) C.uintptr_t {
	s := group.Stream(int(gpu))
	x, err := tensor.FromDLPack(s, pack(managed, unversioned))
	if failed(err) {
		return 0
	}
	if failed(errors.Join(tensor.Add(s, x, x, x), x.Close())) {
		return 0
	}
	return C.uintptr_t(x.Ptr())
}

// chorus_refuses reports whether the tensor is refused. It still belongs to the caller.
//
//export chorus_refuses
func chorus_refuses(gpu C.int, managed unsafe.Pointer, unversioned C.int) C.int {
	if _, err := tensor.FromDLPack(group.Stream(int(gpu)), pack(managed, unversioned)); err != nil {
		fmt.Println("refused:", err)
		return 1
	}
	return 0
}

func takeAll(managed *unsafe.Pointer, unversioned C.int) ([]tensor.Tensor, error) {
	var list []tensor.Tensor
	for i, m := range unsafe.Slice(managed, group.Locals()) {
		x, err := tensor.FromDLPack(group.Stream(i), pack(m, unversioned))
		if err != nil {
			return nil, err
		}
		list = append(list, x)
	}
	return list, nil
}

func closeAll(list []tensor.Tensor) error {
	var errs []error
	for _, x := range list {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

// chorus_all_reduce takes a tensor of each GPU over, and adds them in place.
//
//export chorus_all_reduce
func chorus_all_reduce(managed *unsafe.Pointer, unversioned C.int) C.int {
	list, err := takeAll(managed, unversioned)
	if err == nil {
		err = errors.Join(comm.OfTensors(group).AllReduce(comm.Sum, list...), closeAll(list))
	}
	if failed(err) {
		return -1
	}
	return 0
}

// chorus_time_all_reduce returns the median microseconds of an in-place all-reduce of memory that Chorus has allocated (adopt 0), of
// tensors that are taken over anew for each one (1), or once (2). Each of the rounds enqueues many of them, as a program does.
//
//export chorus_time_all_reduce
func chorus_time_all_reduce(adopt, elements, rounds C.int) C.double {
	const each = 20
	var us []float64
	own := make([]tensor.Tensor, group.Locals())
	for i := range own {
		var err error
		if own[i], err = tensor.Make(group.Stream(i), memory.Float32, int(elements)); failed(err) {
			return -1
		}
	}
	defer closeAll(own)
	take := func() (adopted []tensor.Tensor, err error) { // export and take over: the ways of both directions
		for i, x := range own {
			p, err := x.ToDLPack(nil, false)
			if err != nil {
				return adopted, err
			}
			y, err := tensor.FromDLPack(group.Stream(i), p)
			if err != nil {
				return adopted, err
			}
			adopted = append(adopted, y)
		}
		return adopted, nil
	}
	list := own
	if adopt == 2 {
		var err error
		if list, err = take(); failed(err) {
			return -1
		}
		defer func() { closeAll(list) }()
	}
	reduce := func() error {
		if adopt != 1 {
			return comm.OfTensors(group).AllReduce(comm.Avg, list...)
		}
		adopted, err := take()
		defer func() { closeAll(adopted) }()
		if err != nil {
			return err
		}
		return comm.OfTensors(group).AllReduce(comm.Avg, adopted...)
	}
	for range rounds {
		if failed(group.Wait(ctx)) {
			return -1
		}
		begun := time.Now()
		for range each {
			if failed(reduce()) {
				return -1
			}
		}
		if failed(group.Wait(ctx)) {
			return -1
		}
		us = append(us, float64(time.Since(begun).Nanoseconds())/1e3/each)
	}
	slices.Sort(us)
	return C.double(us[len(us)/2])
}

// chorus_make exports a tensor of rows × columns whose elements count from 0.
//
//export chorus_make
func chorus_make(gpu, rows, columns, unversioned C.int) unsafe.Pointer {
	s := group.Stream(int(gpu))
	x, err := tensor.Make(s, memory.Float32, int(rows), int(columns))
	if failed(err) {
		return nil
	}
	data, err := tensor.Slice[float32](x)
	if failed(err) {
		return nil
	}
	in := make([]float32, data.Len())
	for i := range in {
		in[i] = float32(i)
	}
	if failed(data.CopyFrom(s, in)) {
		return nil
	}
	view := x.T()
	p, err := view.ToDLPack(nil, unversioned != 0)
	if failed(errors.Join(err, s.Sync(ctx), x.Close())) {
		return nil
	}
	return p.Managed
}

// chorus_double_ipc opens memory of another process, doubles its elements, and closes it.
//
//export chorus_double_ipc
func chorus_double_ipc(gpu C.int, handle unsafe.Pointer, offset C.int64_t, elements C.int) C.int {
	s := group.Stream(int(gpu))
	x, err := memory.OpenCUDAIPC[float32](s, *(*memory.CUDAIPCHandle)(handle), int(offset), int(elements))
	if failed(err) {
		return -1
	}
	t, err := tensor.Of(x, int(elements))
	if failed(err) || failed(tensor.Add(s, t, t, t)) || failed(errors.Join(s.Sync(ctx), x.Close())) {
		return -1
	}
	return 0
}

// chorus_allocated returns the bytes that the caching allocator of a GPU has given out.
//
//export chorus_allocated
func chorus_allocated(gpu C.int) C.int64_t {
	n, err := memory.Allocated(group.Device(int(gpu)))
	if failed(err) {
		return -1
	}
	return C.int64_t(n)
}

// chorus_adopted returns the bytes of memory of others that Chorus has.
//
//export chorus_adopted
func chorus_adopted(gpu C.int) C.int64_t {
	u, err := memory.Ledger(group.Device(int(gpu)))
	if failed(err) {
		return -1
	}
	var n uint64
	for _, x := range u.Uses {
		if x.Owner == "adopted memory" {
			n += x.Bytes
		}
	}
	return C.int64_t(n)
}

// chorus_goroutines returns how many there are.
//
//export chorus_goroutines
func chorus_goroutines() C.int { return C.int(runtime.NumGoroutine()) }

// chorus_wait waits until all streams have completed their work.
//
//export chorus_wait
func chorus_wait() C.int {
	if failed(group.Wait(ctx)) {
		return -1
	}
	return 0
}

// chorus_close closes the group.
//
//export chorus_close
func chorus_close() C.int {
	if failed(group.Close()) {
		return -1
	}
	return 0
}
