package machine

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// This file has waits that CUDA hardly documents, so that programs deadlock: calls that wait for all
// work of a device, the thread of host functions, and hardware queues.

const maxQueues = 32

// A hardwareQueue orders the kernels of the streams that share it: a kernel starts only when all
// kernels that were enqueued before it have started, also those of other streams. A device has
// CUDA_DEVICE_MAX_CONNECTIONS of them for each priority. Launches of graphs have their own. m.mu
// guards it.
type hardwareQueue struct {
	streams int   // that exist
	waiting []*Op // kernels that have not started
}

// queueFor returns the hardware queue with the fewest streams, so that streams share one only if
// there are more streams than queues. m.mu is held.
func (d *Device) queueFor(priority int32) *hardwareQueue {
	if d.queues[priority] == nil {
		d.queues[priority] = make([]hardwareQueue, d.m.cfg.Queues)
	}
	list := d.queues[priority]
	best := &list[0]
	for i := range list {
		if list[i].streams < best.streams {
			best = &list[i]
		}
	}
	best.streams++
	return best
}

// kernels are the beginnings of the names of operations that run on multiprocessors.
var kernels = []string{"kernel ", "nccl", "cublas", "cuMemset"}

func isKernel(name string) bool {
	return slices.ContainsFunc(kernels, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// waitsIn says what operations with the name wait for all the time, or "".
func waitsIn(name string) string {
	switch {
	case strings.HasPrefix(name, "nccl"):
		return "the other ranks"
	case name == "cuLaunchHostFunc":
		return "its host function"
	}
	return ""
}

// push adds o to the hardware queue if it is a kernel. m.mu is held.
func (q *hardwareQueue) push(o *Op) {
	if q != nil && isKernel(o.Name) {
		o.queued = true
		q.waiting = append(q.waiting, o)
	}
}

// awaitTurn waits until the operation may start, and starts it. m.mu is held, except during the wait.
func (o *Op) awaitTurn() {
	if !o.queued {
		return
	}
	q, m := o.s.hardware, o.s.dev.m
	if first := q.waiting[0]; first != o {
		turn := make(chan struct{}) // o.turn may be nil again as soon as m.mu is free
		o.turn = turn
		before := o.blocked
		o.blocked = fmt.Sprintf("its hardware queue, where %s on %v was enqueued before", first.Name, first.s)
		m.mu.Unlock()
		m.watch(o.s.dev, turn, func() string {
			return fmt.Sprintf("%s on %v waits for %s; %d streams share a hardware queue: use fewer streams, or set CUDA_DEVICE_MAX_CONNECTIONS (at most %d)",
				o.Name, o.s, o.blocked, q.streams, maxQueues)
		})
		m.mu.Lock()
		o.blocked = before
	}
	i := slices.Index(q.waiting, o) // not the first one on a lost device
	q.waiting = slices.Delete(q.waiting, i, i+1)
	if i == 0 && len(q.waiting) > 0 && q.waiting[0].turn != nil {
		close(q.waiting[0].turn)
		q.waiting[0].turn = nil
	}
}

// occupy counts a collective that starts or ends, and wakes those who wait
// until the device runs none. m.mu is held.
func (o *Op) occupy(delta int) {
	dev := o.s.dev
	if !strings.HasPrefix(o.Name, "nccl") {
		return
	}
	if dev.collectives += delta; dev.collectives == 0 && dev.collectivesEnd != nil {
		close(dev.collectivesEnd)
		dev.collectivesEnd = nil
	}
}

// collectiveStarts reports whether a collective is enqueued on a stream of which no operation waits
// for something: it starts without any further call. m.mu is held.
func (d *Device) collectiveStarts() bool {
	for s := range d.m.working {
		if s.dev == d && (s.running == nil || s.running.blocked == "") &&
			slices.ContainsFunc(s.queue, func(o *Op) bool { return strings.HasPrefix(o.Name, "nccl") }) {
			return true
		}
	}
	return false
}

// awaitMultiprocessors waits until no collective occupies multiprocessors of the device.
func (o *Op) awaitMultiprocessors() bool {
	dev, m := o.s.dev, o.s.dev.m
	for {
		m.mu.Lock()
		switch {
		case dev.collectives == 0 && !dev.collectiveStarts():
			o.blocked = ""
			m.mu.Unlock()
			return true
		case dev.collectives == 0:
			m.mu.Unlock()
			runtime.Gosched()
			continue
		}
		if dev.collectivesEnd == nil {
			dev.collectivesEnd = make(chan struct{})
		}
		end := dev.collectivesEnd
		o.blocked = "multiprocessors that a collective occupies"
		m.mu.Unlock()
		if !m.watch(dev, end, func() string {
			return fmt.Sprintf("%s on %v is a cooperative grid that fills the device, and a collective occupies multiprocessors: use fewer blocks", o.Name, o.s)
		}) {
			return false
		}
	}
}

// watch waits for done, and returns false if the device is lost before. It
// loses the device if no device makes progress for Config.Hang, because all
// operations wait for something; what then describes the wait, with m.mu held.
// m.mu is not held at the call.
func (m *Machine) watch(dev *Device, done <-chan struct{}, what func() string) bool {
	return m.watchUnless(func() bool { return false }, dev, done, what)
}

// watchUnless is watch, but it does not lose the device while an exception applies, which is called with m.mu held.
func (m *Machine) watchUnless(excepted func() bool, dev *Device, done <-chan struct{}, what func() string) bool {
	select { // usually without a timer
	case <-done:
		return true
	default:
	}
	timer := time.NewTicker(m.cfg.Hang)
	defer timer.Stop()
	m.mu.Lock()
	seen := m.progress
	m.mu.Unlock()
	for {
		select {
		case <-done:
			return true
		case <-dev.lost:
			return false
		case <-timer.C:
		}
		m.mu.Lock()
		if m.progress == seen && m.allBlocked() && !excepted() && dev.status == cudadrv.Success {
			text := fmt.Sprintf("%s. Nothing has progressed for %v, and a GPU would hang: %s", what(), m.cfg.Hang, m.pending())
			m.Report(fmt.Sprintf("virtual device %d: %s (seed %#x)", dev.ordinal, text, m.seed))
			dev.lose(cudadrv.ErrorLaunchTimeout, text)
		}
		seen = m.progress
		m.mu.Unlock()
	}
}

// awaitDevice is Await for a call that waits for all work of a device. A wait without progress is a deadlock of the calling
// program, unless an operation waits for another process, which may only be slow. Collectives then have their own deadline.
func (m *Machine) awaitDevice(name string, dev *Device, marks ...*Mark) cudadrv.Result {
	what := func() string {
		return fmt.Sprintf("%s waits for all work of device %d, as in CUDA", name, dev.ordinal)
	}
	for _, k := range marks {
		m.watchUnless(m.waitsElsewhere, dev, k.done, what)
	}
	return m.Await(dev, marks...)
}

// waitsElsewhere reports whether a running operation waits for another process. m.mu is held.
func (m *Machine) waitsElsewhere() bool {
	for s := range m.working {
		if s.running != nil && s.running.remote {
			return true
		}
	}
	return false
}

// allBlocked reports whether every running operation waits for something. m.mu is held.
func (m *Machine) allBlocked() bool {
	for s := range m.working {
		if s.running == nil || s.running.blocked == "" {
			return false
		}
	}
	return true
}

// pending describes the running operations that others wait for. m.mu is held.
func (m *Machine) pending() string {
	var list []string
	for s := range m.working {
		if o := s.running; o != nil && o.counts() {
			list = append(list, fmt.Sprintf("%s on %v of device %d waits for %s", o.Name, s, s.dev.ordinal, o.blocked))
		}
	}
	slices.Sort(list)
	if more := len(list) - 4; more > 0 {
		list = append(list[:4], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(list, "; ")
}

// Block records what the running operation waits for, which it cannot do on its own; "" ends the
// wait. A wait that lasts for Config.Hang is a deadlock. The machine is locked.
func (o *Op) Block(on string) { o.blocked = on }

// WaitForProcesses records that the operation waits for other processes. The machine is locked.
func (o *Op) WaitForProcesses() { o.remote = true }

// counts reports whether the operation is progress of a device: not a mark or a wait. Kernels in graphs are in no hardware
// queue.
func (o *Op) counts() bool { return o.queued || !o.always || isKernel(o.Name) }

// Watch waits for done. It loses the operation's device if no device makes progress for Config.Hang meanwhile: all operations
// wait for something, and none waits for another process. what then describes the wait, with the machine locked.
func (o *Op) Watch(done <-chan struct{}, what func() string) {
	m := o.s.dev.m
	m.watchUnless(m.waitsElsewhere, o.s.dev, done, what)
}

// Drain waits for all work of the devices, as CUDA does in calls that free
// memory or load code, and returns the error of the first lost device. CUDA
// does not document these waits, so they do not order the host after the work.
// The machine is locked, except during the wait.
func (m *Machine) Drain(name string, devs ...*Device) cudadrv.Result {
	var result cudadrv.Result
	for _, dev := range devs {
		if dev.status == cudadrv.Success && dev.busy() {
			marks := dev.marks()
			m.mu.Unlock()
			for _, k := range marks {
				m.watch(dev, k.done, func() string {
					return fmt.Sprintf("%s waits for all work of device %d, as in CUDA", name, dev.ordinal)
				})
			}
			m.mu.Lock()
		}
		if result == cudadrv.Success {
			result = dev.status
		}
	}
	return result
}

// Quiet reports whether all devices are idle. Unlike a query of the driver it does not order the host
// after their work, so that Chorus's own waits hide no race of a program.
func (m *Machine) Quiet() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !slices.ContainsFunc(m.devices, func(d *Device) bool { return d.status == cudadrv.Success && d.busy() })
}

// Pending returns a function that reports a stream that has not done the work
// which is enqueued now, or "" if there is none. Like Quiet, it does not order
// the host after the work.
func (m *Machine) Pending() func() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	type mark struct {
		*Mark
		name string
	}
	var marks []mark
	for _, s := range m.streams {
		if s.dev.status == cudadrv.Success {
			marks = append(marks, mark{s.Mark(), fmt.Sprintf("%v on virtual:%d", s, s.dev.ordinal)})
		}
	}
	for _, d := range m.devices {
		for _, k := range d.ended {
			marks = append(marks, mark{k, fmt.Sprintf("a closed stream on virtual:%d", d.ordinal)})
		}
	}
	return func() string {
		for _, k := range marks {
			if !k.reached() {
				return k.name
			}
		}
		return ""
	}
}

// busy reports whether a stream of the device has work. m.mu is held.
func (d *Device) busy() bool {
	if slices.ContainsFunc(d.ended, func(k *Mark) bool { return !k.reached() }) {
		return true
	}
	for _, s := range d.m.streams {
		if s.dev == d && !s.Idle() {
			return true
		}
	}
	return false
}

// retained returns the devices whose contexts exist. m.mu is held.
func (m *Machine) retained() (list []*Device) {
	for _, dev := range m.devices {
		if dev.retained > 0 {
			list = append(list, dev)
		}
	}
	return list
}

// blocking is the driver with CUDA_LAUNCH_BLOCKING: the host waits for each
// kernel, copy and fill, so that the call that caused an error returns it. During
// a capture nothing runs, so it does not wait.
type blocking struct{ driver }

var _ cudadrv.Auditor = blocking{}

// after runs call and waits for the operation that it enqueued on the stream.
func (d blocking) after(h cudadrv.Stream, call func() cudadrv.Result) cudadrv.Result {
	m := d.m
	bound := m.threads.current()
	if r := call(); r != cudadrv.Success {
		return r
	}
	m.mu.Lock()
	dev := m.deviceOf(bound)
	s, r := m.Stream(dev, h)
	if r != cudadrv.Success || s.capture != nil {
		m.mu.Unlock()
		return cudadrv.Success
	}
	k := s.Mark()
	m.mu.Unlock()
	return m.Await(s.dev, k)
}

func (d blocking) LaunchKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.LaunchKernel(f, grid, block, shared, s, params) })
}

func (d blocking) LaunchCooperativeKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return d.after(s, func() cudadrv.Result {
		return d.driver.LaunchCooperativeKernel(f, grid, block, shared, s, params)
	})
}

func (d blocking) MemcpyHtoDAsync(dst cudadrv.DevicePtr, src unsafe.Pointer, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyHtoDAsync(dst, src, bytes, s) })
}

func (d blocking) MemcpyDtoHAsync(dst unsafe.Pointer, src cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyDtoHAsync(dst, src, bytes, s) })
}

func (d blocking) MemcpyDtoDAsync(dst, src cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyDtoDAsync(dst, src, bytes, s) })
}

func (d blocking) MemcpyPeerAsync(dst cudadrv.DevicePtr, dstCtx cudadrv.Context, src cudadrv.DevicePtr, srcCtx cudadrv.Context, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyPeerAsync(dst, dstCtx, src, srcCtx, bytes, s) })
}

func (d blocking) Memcpy2DAsync(c cudadrv.Memcpy2D, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.Memcpy2DAsync(c, s) })
}

func (d blocking) MemsetD8Async(dst cudadrv.DevicePtr, value uint8, count uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemsetD8Async(dst, value, count, s) })
}
