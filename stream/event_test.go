package stream_test

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// eventVar has the handle that a child process opens.
const eventVar = "CHORUS_TEST_EVENT"

// Another process waits for an event of this one.
func TestInterprocessEvent(t *testing.T) {
	if text := os.Getenv(eventVar); text != "" {
		waitForParent(t, text)
		return
	}
	devs := testgpu.CUDA(t, 1)
	s, p := newStream(t, devs[0]), streamtest.NewSpinner(t, devs[0])
	p.On(s, 0)
	e, err := s.Record(&stream.EventConfig{Interprocess: true})
	require.NoError(t, err)
	defer e.Close()
	h, err := e.IPCHandle()
	require.NoError(t, err)
	cmd := exec.CommandContext(testgpu.Context(t), os.Args[0], "-test.run=^TestInterprocessEvent$", "-test.v")
	cmd.Env = append(os.Environ(), eventVar+"="+hex.EncodeToString(h[:]))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	said := make(map[string]bool)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		switch said[lines.Text()] = true; lines.Text() {
		case "child: open":
			p.On(s, time.Second)
			require.NoError(t, e.Record(s))
			fmt.Fprintln(in, "recorded")
		case "child: passed":
			require.True(t, passed(t, e))
		}
	}
	require.NoError(t, cmd.Wait())
	require.True(t, said["child: pending"], "it saw the record")
	require.True(t, said["child: passed"])
}

func waitForParent(t *testing.T, text string) {
	b, err := hex.DecodeString(text)
	require.NoError(t, err)
	dev := testgpu.CUDA(t, 1)[0]
	e, err := stream.OpenEvent(dev, stream.EventHandle(b))
	require.NoError(t, err)
	defer e.Close()
	s := newStream(t, dev)
	require.NoError(t, s.Sync(testgpu.Context(t)))
	fmt.Println("child: open")
	_, err = bufio.NewReader(os.Stdin).ReadString('\n')
	require.NoError(t, err)
	if !passed(t, e) {
		fmt.Println("child: pending")
	}
	require.NoError(t, s.Wait(e))
	require.NoError(t, s.Sync(testgpu.Context(t)))
	require.True(t, passed(t, e))
	fmt.Println("child: passed")
}

// Two systems of virtual devices stand for two processes.
func TestInterprocessEventOfTwoSystems(t *testing.T) {
	a := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	b := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	s, o := newStream(t, a), newStream(t, b)
	e, err := stream.NewEvent(a, &stream.EventConfig{Interprocess: true})
	require.NoError(t, err)
	h, err := e.IPCHandle()
	require.NoError(t, err)
	far, err := stream.OpenEvent(b, h)
	require.NoError(t, err)
	require.True(t, passed(t, far))
	gate := make(chan struct{})
	require.NoError(t, s.Callback(func() { <-gate }))
	require.NoError(t, e.Record(s))
	require.False(t, passed(t, far))
	require.NoError(t, o.Wait(far))
	require.False(t, synced(t, o))
	close(gate)
	require.NoError(t, o.Sync(testgpu.Context(t)))
	require.True(t, passed(t, far))

	_, err = far.IPCHandle()
	require.ErrorContains(t, err, "the event must be made here")
	_, err = stream.OpenEvent(a, h)
	require.ErrorIs(t, err, device.ErrorInvalidContext, "it is its own")
	elsewhere := h
	elsewhere[20]++ // the process
	_, err = stream.OpenEvent(b, elsewhere)
	require.ErrorIs(t, err, device.ErrorNotSupported)
	require.ErrorContains(t, err, "virtual devices share no events between processes")
	_, err = stream.OpenEvent(b, stream.EventHandle{1})
	require.ErrorIs(t, err, device.ErrorInvalidValue)
	_, err = stream.OpenEvent(nil, h)
	require.ErrorContains(t, err, "no device given")
	require.NoError(t, far.Close())
	require.NoError(t, e.Close())
	plain, err := stream.NewEvent(a, nil)
	require.NoError(t, err)
	defer plain.Close()
	_, err = plain.IPCHandle()
	require.ErrorContains(t, err, "with EventConfig.Interprocess")
}

func externalEvent(t *testing.T, dev *device.Device, timing bool) *stream.Event {
	t.Helper()
	e, err := stream.NewEvent(dev, &stream.EventConfig{External: true, Timing: timing})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func captureOn(t *testing.T, fn func() error, streams ...*stream.Stream) *graph.Exec {
	t.Helper()
	x, err := graph.Capture(streams, fn, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// External events measure a part of each launch.
func TestElapsedInGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, p := newStream(t, devs[0]), streamtest.NewSpinner(t, devs[0])
		start, end := externalEvent(t, devs[0], true), externalEvent(t, devs[0], true)
		p.On(s, 0) // loads the kernel
		require.NoError(t, s.Sync(background))
		const want = 10 * time.Millisecond
		x := captureOn(t, func() error {
			if err := start.Record(s); err != nil {
				return err
			}
			p.On(s, want)
			return end.Record(s)
		}, s)
		require.True(t, passed(t, end), "the capture records nothing")
		_, err := end.Elapsed(start)
		require.ErrorContains(t, err, "must be recorded before")
		for range 3 {
			require.NoError(t, x.Launch(s))
			require.NoError(t, end.Sync(testgpu.Context(t)))
			took, err := end.Elapsed(start)
			require.NoError(t, err)
			require.GreaterOrEqual(t, took, want*99/100)
		}
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		require.NoError(t, x.Launch(s))
		require.False(t, passed(t, end), "the launch records the event again")
		close(gate)
		require.NoError(t, end.Sync(testgpu.Context(t)))
	})
}

// A launch waits for the latest record of an external event outside of the graph, and other
// streams wait for the record of a launch.
func TestExternalWaits(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a, b, s := newStream(t, devs[0]), newStream(t, devs[0]), newStream(t, devs[0])
		ready, done := externalEvent(t, devs[0], false), externalEvent(t, devs[0], false)
		in, err := memory.MakeFrom(a, []int32{0})
		require.NoError(t, err)
		defer in.Close()
		out, err := memory.MakeFrom(a, []int32{0})
		require.NoError(t, err)
		defer out.Close()
		values, err := memory.MakeFrom(a, []int32{1, 2, 3, 4, 5})
		require.NoError(t, err)
		defer values.Close()
		require.NoError(t, a.Sync(background))
		x := captureOn(t, func() error {
			if err := s.Wait(ready); err != nil {
				return err
			}
			if err := memory.Copy(s, out, in); err != nil {
				return err
			}
			return done.Record(s)
		}, s)
		got := []int32{-1}
		for round := range int32(5) {
			gate := make(chan struct{})
			require.NoError(t, a.Callback(func() { <-gate }))
			require.NoError(t, memory.Copy(a, in, values.Slice(int(round), int(round)+1)))
			require.NoError(t, ready.Record(a))
			require.NoError(t, x.Launch(s))
			require.NoError(t, b.Wait(done))
			require.False(t, passed(t, done))
			close(gate)
			require.NoError(t, out.CopyTo(b, got))
			require.Equal(t, round+1, got[0])
			require.NoError(t, a.WaitStream(b))
		}
		require.NoError(t, a.Sync(background))
	})
}

// A closed event stays in the driver until the graphs that record it are closed.
func TestCloseOfExternalEvent(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := externalEvent(t, devs[0], false)
		x := captureOn(t, func() error { return e.Record(s) }, s)
		require.NoError(t, e.Close())
		require.NoError(t, x.Launch(s))
		require.NoError(t, s.Sync(background))
		require.ErrorIs(t, e.Record(s), device.ErrClosed)
		_, err := stream.NewEvent(devs[0], &stream.EventConfig{External: true, Interprocess: true})
		require.ErrorContains(t, err, "leave out External or Interprocess")
	})
}
