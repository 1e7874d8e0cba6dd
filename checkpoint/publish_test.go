package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

const publishedLen = 100_000 // so that parts of one type are not packed

// publishedValue is element i of the published tensor, a number that bfloat16 has.
func publishedValue(version int64, i int) float64 { return float64((int(version) + i) % 200) }

// onEach runs fn for all processes at the same time.
func onEach(t *testing.T, gs []*comm.Group, fn func(i int) error) {
	t.Helper()
	errs := make([]error, len(gs))
	var wg sync.WaitGroup
	for i := range gs {
		wg.Go(func() { errs[i] = fn(i) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// A publication is a Publisher in each process of a training.
type publication struct {
	t      *testing.T
	groups []*comm.Group
	pubs   []*Publisher
	parts  [][][]Part // by process and local rank
}

// newPublication divides the tensor among all ranks, in float32.
func newPublication(t *testing.T, gs []*comm.Group) *publication {
	p := &publication{t: t, groups: gs, pubs: make([]*Publisher, len(gs)), parts: make([][][]Part, len(gs))}
	for k, g := range gs {
		for i := range g.Locals() {
			rank := g.Rank() + i
			start := publishedLen * rank / g.Size()
			part := Part{Name: "w", Shape: []int{publishedLen}, Flat: true, Start: start}
			n := publishedLen*(rank+1)/g.Size() - start
			p.parts[k] = append(p.parts[k], []Part{makePart(t, g.Stream(i), part, memory.Float32, []int{n}, func(int) float64 { return 0 })})
		}
	}
	onEach(t, gs, func(k int) (err error) {
		p.pubs[k], err = NewPublisher(t.Context(), gs[k], publishedAt("127.0.0.1:0"), p.parts[k])
		return err
	})
	t.Cleanup(p.close)
	return p
}

func publishedAt(addr string) *cluster.RegistryConfig {
	return &cluster.RegistryConfig{Addr: addr, Timing: cluster.Timing{Join: 20 * time.Second}, Notify: func(string) {}}
}

func (p *publication) close() {
	for _, x := range p.pubs {
		require.NoError(p.t, x.Close())
	}
}

// write gives the tensor the values of a version.
func (p *publication) write(version int64) {
	for k, lists := range p.parts {
		for i, parts := range lists {
			host := make([]float32, parts[0].Data.Len())
			for j := range host {
				host[j] = float32(publishedValue(version, parts[0].Start+j))
			}
			data, err := tensor.Slice[float32](parts[0].Data)
			require.NoError(p.t, errors.Join(err, data.CopyFrom(p.groups[k].Stream(i), host)))
		}
	}
}

// publish gives the tensor the values of a version and publishes it.
func (p *publication) publish(ctx context.Context, version int64) ([]string, error) {
	p.write(version)
	names, errs := make([][]string, len(p.pubs)), make([]error, len(p.pubs))
	var wg sync.WaitGroup
	for k, x := range p.pubs {
		wg.Go(func() { names[k], errs[k] = x.Publish(ctx, version) })
	}
	wg.Wait()
	for k := range p.pubs {
		require.Equal(p.t, names[0], names[k], "all ranks return the same names")
		require.Equal(p.t, errs[0] == nil, errs[k] == nil, "all ranks fail together: %v", errs)
	}
	return names[0], errors.Join(errs...)
}

// subscribersAre is what an error says of the subscribers.
func (p *publication) subscribersAre(names string) string {
	if n := p.groups[0].Size(); len(p.pubs) != n {
		return fmt.Sprintf("(ranks from %d on, or processes from %d on are the subscribers %s)", n, len(p.pubs), names)
	}
	return fmt.Sprintf("(ranks from %d on are the subscribers %s)", len(p.pubs), names)
}

// A client is a Subscriber with its tensor, in bfloat16.
type client struct {
	*Subscriber
	t     *testing.T
	part  Part
	leave func() // ends takeAll
}

func (p *publication) subscribe(name string, dev *device.Device, dt memory.DType, n int) *client {
	s, err := stream.New(dev, nil)
	require.NoError(p.t, err)
	p.t.Cleanup(func() { require.NoError(p.t, s.Close()) })
	c := &client{t: p.t, part: makePart(p.t, s, Part{Name: "w"}, dt, []int{n}, func(int) float64 { return -1 })}
	cfg := publishedAt(p.pubs[0].registry.Addr())
	c.Subscriber, err = Subscribe(p.t.Context(), s, &cluster.EnlistConfig{Addr: cfg.Addr, Name: name, Timing: cfg.Timing}, []Part{c.part})
	require.NoError(p.t, err)
	p.t.Cleanup(func() { require.NoError(p.t, c.Close()) })
	return c
}

// next returns the next version, whose values it compares.
func (c *client) next(ctx context.Context) (int64, error) {
	version, err := c.Next(ctx)
	if err != nil {
		return version, err
	}
	host := make([]float64, publishedLen)
	x, err := tensor.OfHost(host, publishedLen)
	if err = errors.Join(err, tensor.Copy(c.stream, x, c.part.Data)); err != nil {
		return version, err
	}
	for i, v := range host {
		if want := publishedValue(version, i); v != want {
			return version, fmt.Errorf("version %d has %v at %d: want %v", version, v, i, want)
		}
	}
	return version, nil
}

// takeAll takes versions until leave, also after pushes that have failed.
func (c *client) takeAll() <-chan int64 {
	versions, left := make(chan int64, 10), make(chan struct{})
	ctx, cancel := context.WithCancel(c.t.Context())
	go func() {
		defer close(left)
		for ctx.Err() == nil {
			if version, err := c.next(ctx); err == nil {
				versions <- version
			}
		}
	}()
	c.leave = func() {
		cancel()
		<-left
		require.NoError(c.t, c.Close())
	}
	c.t.Cleanup(c.leave)
	return versions
}

// during runs f, while each client takes a version.
func during(t *testing.T, version int64, f func(), clients ...*client) {
	t.Helper()
	got, errs := make([]int64, len(clients)), make([]error, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		wg.Go(func() { got[i], errs[i] = c.next(t.Context()) })
	}
	f()
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for i := range clients {
		require.Equal(t, version, got[i])
	}
}

// eachTraining runs f with a training of two ranks, in one or two processes, and the other devices.
func eachTraining(t *testing.T, f func(t *testing.T, gs []*comm.Group, others []*device.Device)) {
	for _, processes := range []int{1, 2} {
		t.Run(fmt.Sprintf("processes=%d", processes), func(t *testing.T) {
			testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
				gs := []*comm.Group{nil}
				if processes == 1 {
					gs[0] = localGroup(t, devs[:2])
				} else {
					gs = joinedGroups(t, devs[:2])
				}
				f(t, gs, devs[2:])
			})
		})
	}
}

// Subscribers come, leave and return between pushes, and leave while the ranks wait for them.
func TestPublish(t *testing.T) {
	eachTraining(t, func(t *testing.T, gs []*comm.Group, devs []*device.Device) {
		p := newPublication(t, gs)
		push := func(version int64, names ...string) func() {
			return func() {
				t.Helper()
				got, err := p.publish(t.Context(), version)
				require.NoError(t, err)
				require.Equal(t, names, got)
			}
		}
		push(1)()
		a := p.subscribe("a", devs[0], memory.BFloat16, publishedLen)
		during(t, 2, push(2, "a"), a)
		link := a.link
		during(t, 3, push(3, "a"), a)
		require.Same(t, link, a.link, "a push without changes needs no other group")
		b := p.subscribe("b", devs[1], memory.BFloat16, publishedLen)
		during(t, 4, push(4, "a", "b"), a, b)
		require.NoError(t, b.Close())
		b = p.subscribe("b", devs[1], memory.BFloat16, publishedLen) // under the same name before the next push
		during(t, 5, push(5, "a", "b"), a, b)
		leavesDuring := func(f func()) func() {
			return func() {
				var wg sync.WaitGroup
				wg.Go(func() {
					time.Sleep(100 * time.Millisecond)
					_ = b.Close()
				})
				f()
				wg.Wait()
			}
		}
		during(t, 6, leavesDuring(push(6, "a")), a) // begins in the group with b
		b = p.subscribe("b", devs[1], memory.BFloat16, publishedLen)
		during(t, 7, leavesDuring(push(7, "a")), a) // begins with a new group
		ends := func(end func(*Publisher) error) {
			ended := make(chan error, 1)
			go func() {
				_, err := a.Next(t.Context())
				ended <- err
			}()
			onEach(t, gs, func(k int) error { return end(p.pubs[k]) })
			require.ErrorIs(t, <-ended, cluster.ErrEnded)
		}
		ends(func(x *Publisher) error { return x.Shutdown(t.Context()) })
		ends((*Publisher).Close)
	})
}

// A push that fails changes nothing for the ranks that publish: they may write the parts at once, and the next push begins again.
func TestPublishFails(t *testing.T) {
	eachTraining(t, func(t *testing.T, gs []*comm.Group, devs []*device.Device) {
		p := newPublication(t, gs)
		a := p.subscribe("a", devs[0], memory.BFloat16, publishedLen)
		wrong := p.subscribe("wrong", devs[1], memory.BFloat16, publishedLen+1)
		fails := make(chan error, 2)
		for _, c := range []*client{a, wrong} {
			go func() {
				_, err := c.Next(t.Context())
				fails <- err
			}()
		}
		_, err := p.publish(t.Context(), 1)
		require.ErrorContains(t, err, `"w"`)
		require.ErrorContains(t, err, p.subscribersAre("a, wrong"))
		require.ErrorContains(t, <-fails, `"w"`)
		require.ErrorContains(t, <-fails, `"w"`)
		require.NoError(t, wrong.Close())
		during(t, 2, func() { _, err = p.publish(t.Context(), 2) }, a)
		require.NoError(t, err)

		// The subscriber does not call Next: the first time in a group, and the second time before there is one.
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			_, err = p.publish(ctx, 3)
			cancel()
			require.Error(t, err)
		}
		require.ErrorContains(t, err, p.subscribersAre("a"))
		for _, g := range gs {
			require.NoError(t, g.Err())
		}
		versions := a.takeAll()
		names, err := p.publish(t.Context(), 4)
		require.NoError(t, err)
		require.Equal(t, []string{"a"}, names)
		require.Equal(t, int64(4), <-versions)

		// A context that has ended leaves no process an invitation that it takes for the next one.
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for i := range int64(3) {
			b := p.subscribe("b", devs[1], memory.BFloat16, publishedLen)
			_, err = p.publish(ended, 5)
			require.ErrorIs(t, err, context.Canceled)
			got := b.takeAll()
			names, err = p.publish(t.Context(), 6+i)
			require.NoError(t, err)
			require.Equal(t, []string{"a", "b"}, names)
			require.Equal(t, 6+i, <-got)
			require.Equal(t, 6+i, <-versions)
			b.leave()
			_, err = p.publish(t.Context(), 4)
			require.NoError(t, err)
			require.Equal(t, int64(4), <-versions)
		}
		a.leave()
	})
}

// The work of a push that was aborted may still read the parts: the group's streams wait for it.
func TestPublishIsAborted(t *testing.T) {
	eachTraining(t, func(t *testing.T, gs []*comm.Group, devs []*device.Device) {
		p := newPublication(t, gs)
		a := p.subscribe("a", devs[0], memory.Float32, publishedLen) // the ranks send the parts themselves
		for i := range int64(5) {
			during(t, 2*i, func() { _, _ = p.publish(t.Context(), 2*i) }, a)
			release := streamtest.Hold(t, a.stream)
			aborted := make(chan error, 1)
			next, stop := context.WithCancel(t.Context()) // if this machine is slow, the push ends before a is in its world
			go func() {
				_, err := a.Next(next)
				aborted <- err
			}()
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			_, err := p.publish(ctx, 2*i+1)
			cancel()
			require.Error(t, err)
			p.write(2*i + 2)
			release()
			stop()
			require.Error(t, <-aborted)
		}
	})
}

// The arguments are validated before others wait for them.
func TestPublishArguments(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	gs, errs := joinedGroups(t, devs), make([]error, len(devs))
	for _, bad := range []struct {
		cfg   *cluster.RegistryConfig
		parts [][]Part
		want  string
	}{
		{nil, nil, "no address"},
		{publishedAt("192.0.2.1:0"), nil, "rank 0"},
		{publishedAt("127.0.0.1:0"), [][]Part{nil, nil}, "parts of 2 ranks"},
	} {
		onEach(t, gs, func(i int) error {
			_, errs[i] = NewPublisher(t.Context(), gs[i], bad.cfg, bad.parts)
			return nil
		})
		for _, err := range errs {
			require.ErrorContains(t, err, bad.want)
		}
	}
	_, err := NewPublisher(t.Context(), nil, nil, nil)
	require.ErrorContains(t, err, "no group given")
	_, err = Subscribe(t.Context(), nil, nil, nil)
	require.ErrorContains(t, err, "no stream given")
	_, err = Subscribe(t.Context(), gs[0].Stream(0), &cluster.EnlistConfig{}, []Part{{Name: "w"}})
	require.ErrorContains(t, err, `"w"`)
	_, err = Subscribe(t.Context(), gs[0].Stream(0), &cluster.EnlistConfig{}, nil)
	require.ErrorContains(t, err, "no address")
	require.NoError(t, (*Publisher)(nil).Close())
	require.NoError(t, (*Subscriber)(nil).Close())
}

// After Close and Shutdown, a call returns at once, also with an invitation that has come before.
func TestPublishAfterClose(t *testing.T) {
	eachTraining(t, func(t *testing.T, gs []*comm.Group, devs []*device.Device) {
		for name, end := range map[string]func(*Publisher) error{
			"close":    (*Publisher).Close,
			"shutdown": func(x *Publisher) error { return x.Shutdown(t.Context()) },
		} {
			for pushes := range int64(3) {
				p := newPublication(t, gs)
				if pushes == 1 {
					names, err := p.publish(t.Context(), pushes)
					require.NoError(t, err)
					require.Empty(t, names)
				}
				a := p.subscribe("a", devs[0], memory.BFloat16, publishedLen)
				if pushes == 2 {
					during(t, pushes, func() { _, _ = p.publish(t.Context(), pushes) }, a)
					ended := make(chan error, 1)
					go func() {
						_, err := a.Next(t.Context())
						ended <- err
					}()
					onEach(t, gs, func(k int) error { return end(p.pubs[k]) })
					require.ErrorIs(t, <-ended, cluster.ErrEnded)
				} else {
					onEach(t, gs, func(k int) error { return end(p.pubs[k]) })
				}
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				for k, x := range p.pubs { // one after the other: none waits for the others
					names, err := x.Publish(ctx, pushes)
					require.ErrorIs(t, err, device.ErrClosed, "%s after %d pushes", name, pushes)
					require.ErrorContains(t, err, fmt.Sprintf("publish on rank %d: the publisher", k))
					require.Empty(t, names)
					require.NoError(t, errors.Join(x.Shutdown(ctx), x.Close(), x.Shutdown(ctx)))
				}
				require.NoError(t, errors.Join(a.Close(), a.Close()))
				for range 2 {
					_, err := a.Next(ctx)
					require.ErrorIs(t, err, device.ErrClosed)
					require.ErrorIs(t, err, cluster.ErrDelisted)
				}
				require.NoError(t, ctx.Err())
				cancel()
			}
		}
	})
}
