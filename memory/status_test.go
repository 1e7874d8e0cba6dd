package memory_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/nvml"
	"github.com/gochorus/chorus/internal/status"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/buffers"
	"github.com/gochorus/chorus/memory"
)

// sensors is an NVML of two GPUs, of which it knows the second.
type sensors struct {
	nvml.API
	uuid string
}

func (s sensors) Device(uuid string) (nvml.Device, error) {
	if uuid != s.uuid {
		return nil, &nvml.UnsupportedError{Need: "another GPU"}
	}
	return sensorsOfOne{}, nil
}

type sensorsOfOne struct{ nvml.Device }

func (sensorsOfOne) Utilization() (gpu, memory int, err error) { return 87, 12, nil }
func (sensorsOfOne) Temperature() (int, error)                 { return 61, nil }
func (sensorsOfOne) Power() (int, error)                       { return 321_500, nil }
func (sensorsOfOne) SMClock() (int, error)                     { return 1980, nil }

// TestStatusSensors reads the sensors that chorus run exports as metrics, from NVML by the UUID of the device.
func TestStatusSensors(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	props, err := devs[1].Properties()
	require.NoError(t, err)
	gpu.DeviceOf(devs[1]).System().Sensors = sensors{uuid: props.UUID}
	for _, d := range devs {
		x, err := memory.Make[byte](buffers.NewStream(t, d), 1)
		require.NoError(t, err)
		defer x.Close()
	}
	found := map[string]status.Device{}
	p, err := status.Decode(status.Take(time.Minute))
	require.NoError(t, err)
	for _, d := range p.Devices {
		found[d.UUID] = d
	}
	require.Equal(t, []any{87, 61, 321_500, 1980}, []any{*found[props.UUID].Utilization, *found[props.UUID].Temperature, *found[props.UUID].PowerDraw, *found[props.UUID].ClockRate})
	props, err = devs[0].Properties()
	require.NoError(t, err)
	require.Nil(t, found[props.UUID].Temperature, "a GPU without this sensor")
	require.Equal(t, "Chorus Virtual Device", found[props.UUID].Product)
}
