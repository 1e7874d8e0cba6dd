package machine

import (
	"fmt"
	"runtime"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

// runHost calls a host function on a dedicated thread, after those of the context's other streams
// that came before.
func (o *Op) runHost(f dl.Closure) {
	dev := o.s.dev
	if !dev.m.watch(dev, dev.hostThread, func() string {
		return fmt.Sprintf("a host function of %v waits for a host function of another stream: all those of a device run on one thread, so they must not wait for each other", o.s)
	}) {
		return
	}
	defer func() { dev.hostThread <- struct{}{} }()
	dev.m.mu.Lock()
	lost := dev.status != cudadrv.Success
	dev.m.mu.Unlock()
	if lost { // while the function waited: CUDA calls none after an error
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer dev.m.threads.hosts.Enter()()
	f.Call()
}

func (d driver) LaunchHostFunc(h cudadrv.Stream, f dl.Closure) cudadrv.Result {
	c, s, r := d.beginStream("cuLaunchHostFunc", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if f == 0 {
		return cudadrv.ErrorInvalidValue
	}
	c.enqueue(s, func(o *Op) { o.runHost(f) })
	return cudadrv.Success
}

// A userObject calls its closure when its last reference is released. m.mu guards it.
type userObject struct {
	m       *Machine
	handle  cudadrv.UserObject
	refs    int
	closure dl.Closure
}

func (d driver) UserObjectCreate(f dl.Closure) (cudadrv.UserObject, cudadrv.Result) {
	c, r := d.begin("cuUserObjectCreate")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	h := cudadrv.UserObject(d.m.Handle())
	d.m.objects[h] = &userObject{d.m, h, 1, f}
	return h, cudadrv.Success
}

func (d driver) UserObjectRelease(h cudadrv.UserObject, count uint32) cudadrv.Result {
	c, r := d.beginEnding("cuUserObjectRelease")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	o := d.m.objects[h]
	if o == nil || count == 0 || int(count) > o.refs {
		return cudadrv.ErrorInvalidValue
	}
	for range count {
		o.release()
	}
	return cudadrv.Success
}

// GraphRetainUserObject also accepts the handle of a graph whose capture is not
// complete.
func (d driver) GraphRetainUserObject(g cudadrv.Graph, h cudadrv.UserObject, count, flags uint32) cudadrv.Result {
	c, r := d.begin("cuGraphRetainUserObject")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	o, list := d.m.objects[h], d.m.objectsOf(g)
	move := flags == cudadrv.GraphUserObjectMove
	if o == nil || list == nil || count == 0 || flags != 0 && !move || move && int(count) > o.refs {
		return cudadrv.ErrorInvalidValue
	}
	for range count {
		*list = append(*list, o)
	}
	if !move {
		o.refs += int(count)
	}
	return cudadrv.Success
}

// objectsOf returns the user objects of a graph or of a capture. m.mu is held.
func (m *Machine) objectsOf(h cudadrv.Graph) *[]*userObject {
	if g := m.graphs[h]; g != nil {
		return &g.objects
	}
	for _, c := range m.captures {
		if c.handle == h {
			return &c.objects
		}
	}
	return nil
}

// use adds delta to the references of the graph. When the last one is released,
// it releases the graph's objects. m.mu is held.
func (g *graph) use(delta int) {
	if g.users += delta; g.users == 0 {
		letGo(g.objects)
		g.objects = nil
	}
}

func letGo(objects []*userObject) {
	for _, o := range objects {
		o.release()
	}
}

func (o *userObject) release() {
	if o.refs--; o.refs == 0 {
		delete(o.m.objects, o.handle)
		o.closure.Release()
	}
}
