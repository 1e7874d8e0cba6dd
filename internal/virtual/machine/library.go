package machine

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

// This file has the methods that exist for the libraries above the machine. A method that
// the driver uses, too, is in the file of its object.

// Lock locks the machine: the state of devices, streams and memory, and the state that a
// library declares to be guarded by it.
func (m *Machine) Lock() { m.mu.Lock() }

// Unlock unlocks the machine.
func (m *Machine) Unlock() { m.mu.Unlock() }

// Initialized reports whether cuInit was called. The machine is locked.
func (m *Machine) Initialized() bool { return m.initialized }

// Devices returns the devices by ordinal.
func (m *Machine) Devices() []*Device { return m.devices }

// Fault counts a call by its C name and returns the fault that the plan has for it. A call
// that hangs, but does not enqueue an operation, hangs here.
func (m *Machine) Fault(name string) Fault { return m.faults.Next(name) }

// FaultIn is Fault for a call that needs a context, which is bound to a device.
func (m *Machine) FaultIn(bound cudadrv.Context, name string) Fault {
	if !m.faults.Scoped() {
		return m.faults.Next(name)
	}
	m.mu.Lock()
	ordinal := int32(noDevice)
	if dev := m.deviceOf(bound); dev != nil {
		ordinal = dev.ordinal
	}
	m.mu.Unlock()
	return m.faults.NextOn(name, ordinal)
}

// FaultOn is Fault for a call on a device.
func (m *Machine) FaultOn(dev *Device, name string) Fault {
	if dev == nil {
		return m.faults.Next(name)
	}
	return m.faults.NextOn(name, dev.ordinal)
}

// AddReports registers f, whose mistakes Reports also returns.
func (m *Machine) AddReports(f func() []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reporters = append(m.reporters, f)
}

// Unbind returns the context of the calling thread and unbinds it, as in
// threads.take.
func (m *Machine) Unbind() cudadrv.Context { return m.threads.take() }

// Retained returns the device whose primary context is c, or nil if the context is not
// retained. The machine is locked.
func (m *Machine) Retained(c cudadrv.Context) *Device {
	if d := m.deviceOf(c); d != nil && d.retained > 0 {
		return d
	}
	return nil
}

// InHostFunction reports whether the calling thread runs a host function.
func (m *Machine) InHostFunction() bool { return m.threads.hosts.Has() }

// Clocks returns the number of streams and operations of the host that exist. The machine is locked.
func (m *Machine) Clocks() int { return m.slots.InUse() }

// Ordinal returns the number of the device.
func (d *Device) Ordinal() int32 { return d.ordinal }

// UUID returns the device's UUID.
func (d *Device) UUID() cudadrv.UUID { return d.uuid }

// Status returns the error of a lost device, or Success. The machine is locked.
func (d *Device) Status() cudadrv.Result { return d.status }

// Why returns the reason for the loss of the device, or "". The machine is locked.
func (d *Device) Why() string { return d.why }

// LaunchWaits reports whether a launch on the device waits for space. The machine is locked.
func (d *Device) LaunchWaits() bool { return d.waiting > 0 }

// AllocPublic allocates memory that is accessible from all devices. The machine is locked.
func (d *Device) AllocPublic(bytes uintptr) (cudadrv.DevicePtr, cudadrv.Result) {
	return d.allocPtr(bytes, func() *Block {
		b := newBlock(d, uint64(bytes), blockAlign)
		b.public = true
		return b
	})
}

// FreePublic waits for the device, like cuMemFree, and frees memory of
// AllocPublic; found is false if p is not such memory. The machine is not
// locked.
func (m *Machine) FreePublic(name string, p cudadrv.DevicePtr) (r cudadrv.Result, found bool) {
	m.mu.Lock()
	b := m.owned(p)
	if b == nil || !b.public {
		m.mu.Unlock()
		return cudadrv.Success, false
	}
	return m.freeWaiting(name, b), true
}

// Device returns the device of the stream.
func (s *Stream) Device() *Device { return s.dev }

// Capturing reports whether the stream is being captured. The machine is locked.
func (s *Stream) Capturing() bool { return s.capture != nil }

// Capture returns the capture of the stream, or nil. The machine is locked.
func (s *Stream) Capture() *Capture { return s.capture }

// Destroyed reports whether the stream was destroyed. The machine is locked.
func (s *Stream) Destroyed() bool { return s.destroyed }

// Invalidated reports whether the stream's capture was invalidated. The machine is locked.
func (s *Stream) Invalidated() bool { return s.capture != nil && s.capture.invalid }

// EnqueueCall appends the operation of a call, or records it if the stream is being
// captured, with the planned fault of the call: it hangs, begins later, or Op.Wrong is set. The machine is locked.
func (s *Stream) EnqueueCall(name string, x Fault, run func(*Op)) {
	c := call{m: s.dev.m, name: name, hang: x.Hang, wrong: x.Wrong, slow: x.Slow}
	c.enqueue(s, run)
}

// EnqueueAlways appends an operation that runs on a lost device, too, because something
// waits for its end. The machine is locked.
func (s *Stream) EnqueueAlways(name string, run func(*Op)) {
	s.push(&Op{Name: name, always: true, run: run, ticket: s.ticket(name, 0), blocked: waitsIn(name)})
}

// Event returns the device and the flags of an event; the device is nil if h is not an event.
// The machine is locked.
func (m *Machine) Event(h cudadrv.Event) (*Device, uint32) {
	if e := m.event(h); e != nil {
		return e.dev, e.flags
	}
	return nil, 0
}

// Record records an event on the stream, which is not captured, unless the
// event was destroyed. The machine is locked.
func (s *Stream) Record(name string, h cudadrv.Event) {
	if e := s.dev.m.event(h); e != nil {
		e.record(name, s)
	}
}

// Machine returns the machine of the operation.
func (o *Op) Machine() *Machine { return o.s.dev.m }

// Device returns the device of the operation's stream.
func (o *Op) Device() *Device { return o.s.dev }

// Wrong reports whether the fault plan asks the operation to deliver a wrong byte.
func (o *Op) Wrong() bool { return o.wrong }

// Now returns the operation's point in time. The machine is locked.
func (o *Op) Now() sanitizer.Stamp { return o.s.now }

// After orders the operation after a point in time. The machine is locked.
func (o *Op) After(s sanitizer.Stamp) { o.s.now.Seen = o.s.now.Seen.JoinStamp(s) }

// AfterAll orders the operation after the points of a clock. The machine is locked.
func (o *Op) AfterAll(c sanitizer.Clock) { o.s.now.Seen = o.s.now.Seen.Join(c) }

// HostOp returns an operation of the host, which follows only those operations
// that the host has waited for. The machine is locked.
func (m *Machine) HostOp(dev *Device, name string) *Op {
	s := &Stream{dev: dev, handle: sanitizer.Host, now: m.slots.Take()}
	s.now.Seen = m.host
	s.now.Epoch++
	return &Op{Name: name, s: s, host: m.host}
}

// HostDone is called when the host knows that its operation has completed. The machine is locked.
func (m *Machine) HostDone(o *Op) {
	m.host = m.host.JoinStamp(o.s.now)
	m.slots.Put(o.s.now)
}

// InHostMemory reports whether p is below all addresses of devices.
func InHostMemory(p cudadrv.DevicePtr) bool { return p < addressBase }

// Room returns the number of bytes from p, an address of the block, to its end.
func (b *Block) Room(p cudadrv.DevicePtr) uint64 { return b.size - (uint64(p) - b.addr) }

// Offset returns the number of bytes from the start of the block to p, an address of the block.
func (b *Block) Offset(p cudadrv.DevicePtr) uint64 { return uint64(p) - b.addr }

// Reserved reports whether the block is a reservation of addresses, whose memory is physical memory
// with handles (cuMemMap).
func (b *Block) Reserved() bool { return b.space != nil }

// Covers reports whether all of [p, p+n) has memory. The bytes of a reservation have memory
// only if something is mapped there. The machine is locked.
func (b *Block) Covers(p cudadrv.DevicePtr, n uint64) bool {
	return b.space == nil || b.space.covered(uint64(p)-b.addr, n) == n
}

// Public reports whether all devices can access the block. The machine is locked.
func (b *Block) Public() bool { return b.public }

// Freed reports whether a call has freed the block, even if the call is not done. The machine is locked.
func (b *Block) Freed() bool { return b.freeing }

// Device returns the device of the block, or nil for page-locked host memory.
func (b *Block) Device() *Device { return b.dev }

// Barred returns why the device must not write all of [p, p+n) of a reservation, or "".
// The machine is locked.
func (b *Block) Barred(p cudadrv.DevicePtr, n uint64, dev *Device) string {
	if b.space == nil {
		return ""
	}
	return b.space.barred(uint64(p)-b.addr, n, dev, true)
}

// Register adds delta to the block's registrations with cuFile. The machine is locked.
func (b *Block) Register(delta int) { b.registrations += delta }
