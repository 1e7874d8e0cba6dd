package comm_test

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ras/rastest"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
)

// TestVerdictOfTheService has a service that knows of a silent rank. Another job's service is not
// believed.
func TestVerdictOfTheService(t *testing.T) {
	silent := rastest.Rank{Host: "10.0.0.2", PID: 4711, Silent: true}
	for name, c := range map[string]struct {
		pid  int
		want string
	}{
		"this job":    {os.Getpid(), "late\nNCCL's RAS: rank 1 (process 4711 on host 10.0.0.2) does not answer"},
		"another job": {os.Getpid() + 1, "late"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("NCCL_RAS_ADDR", rastest.Serve(t, rastest.Answer(rastest.Rank{PID: c.pid}, silent)))
			gs := twoRanks(t)
			late := errors.New("late")
			err := analyzedByService(t, gs[0], late)
			require.ErrorIs(t, err, late)
			require.EqualError(t, err, c.want)
		})
	}
}

// TestServiceIsBeneathTheVerdict has a service and recorders that both know of rank 1.
func TestServiceIsBeneathTheVerdict(t *testing.T) {
	t.Setenv("NCCL_RAS_ADDR", rastest.Serve(t, rastest.Answer(rastest.Rank{PID: os.Getpid(), AllReduces: 1}, rastest.Rank{PID: os.Getpid()})))
	gs := twoRanks(t)
	xs, err := comm.MakeFrom(gs[0], make([]float32, 8))
	require.NoError(t, err)
	t.Cleanup(func() { _ = xs.Close() })
	go func() { _ = comm.AllReduce(gs[0], comm.Sum, xs...) }() // waits for rank 1
	require.Eventually(t, func() bool { return gs[0].Communicator(0).Progress().Issued.Record > 0 }, time.Minute, time.Millisecond)
	err = analyzedByService(t, gs[0], errors.New("late"))
	require.Regexp(t, `(?s)^late; the flight recorders of the ranks say: Rank 1 .*\nNCCL's RAS: the ranks have launched different numbers of AllReduce: rank 1 \(process \d+ on host \) 0, rank 0 \(process \d+ on host \) 1$`, err.Error())
}

// analyzedByService returns the analysis of an error. It asks again if there are no findings of the
// service: the limits for its answers are shorter than a busy machine may stop.
func analyzedByService(t *testing.T, g *comm.Group, late error) (err error) {
	t.Helper()
	for range 5 {
		err = comm.Analyzed(testgpu.Context(t), g, time.Minute, late)
		if strings.Contains(err.Error(), "NCCL's RAS: ") {
			break
		}
	}
	return err
}

// TestSilentServiceDelaysNothing has a service that does not answer the question. The verdict waits
// no longer for it than for the recorders.
func TestSilentServiceDelaysNothing(t *testing.T) {
	t.Setenv("NCCL_RAS_ADDR", "")
	gs, late := twoRanks(t), errors.New("late")
	require.Equal(t, late, comm.Analyzed(testgpu.Context(t), gs[0], time.Minute, late)) // all recorders have answered
	t.Setenv("NCCL_RAS_ADDR", rastest.Listen(t, func(c net.Conn) {
		rastest.Speak(c, true, func() string { _, _ = io.Copy(io.Discard, c); return "" })
	}))
	var err error
	var took time.Duration
	for range 5 { // the machine may stop for a while
		begin := time.Now()
		err = comm.Analyzed(testgpu.Context(t), gs[0], 100*time.Millisecond, late)
		if took = time.Since(begin); took < time.Second && err == late {
			return
		}
	}
	t.Errorf("the verdict took %v: %v: the question to the service takes 2 s", took, err)
}

// TestNoServiceOfVirtualDevices does not ask the default port.
func TestNoServiceOfVirtualDevices(t *testing.T) {
	t.Setenv("NCCL_RAS_ADDR", "")
	require.Empty(t, comm.ServiceAddress(twoRanks(t)[0]))
	t.Setenv("NCCL_RAS_ADDR", "10.0.0.1:9")
	require.Equal(t, "10.0.0.1:9", comm.ServiceAddress(twoRanks(t)[0]))
}

// twoRanks returns the groups of two ranks.
func twoRanks(t *testing.T) []*comm.Group {
	t.Helper()
	gs, errs := groups.Join(t, testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	require.NoError(t, errors.Join(errs...))
	return gs
}
