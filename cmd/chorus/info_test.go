package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
)

func TestInfo(t *testing.T) {
	t.Setenv("CHORUS_BACKEND", "virtual")
	t.Setenv("CHORUS_VIRTUAL_DEVICES", "2")
	sys, err := device.NewSystem(nil)
	require.NoError(t, err)
	r, err := inspect(sys, "a note")
	require.NoError(t, err)
	var out bytes.Buffer
	require.NoError(t, r.print(&out))
	for _, want := range []string{"a note", "TELEMETRY", "virtual:1", "0 MiB used", "process ",
		"the utilization of virtual:0 needs a GPU; this machine has virtual devices"} {
		require.Contains(t, out.String(), want)
	}
	text, err := json.Marshal(r)
	require.NoError(t, err)
	require.Contains(t, string(text), `"memory_used_bytes":0`)
	require.NotContains(t, string(text), "temperature", "what is not known is absent")
}

func TestReading(t *testing.T) {
	n := func(v int) *int { return &v }
	used := uint64(3 << 30)
	r := &reading{Utilization: n(97), MemoryActivity: n(31), Temperature: n(36), PowerDraw: n(76543), ClockRate: n(1980),
		MemoryUsed: &used, NVLinks: []bool{true, false, true}, Processes: []device.Process{{PID: 7, MemoryBytes: 5 << 20}}}
	require.Equal(t, "busy 97%, memory active 31%, 36 °C, 77 W, 1980 MHz, 3072 MiB used, 2 of 3 NVLinks up, process 7 uses 5 MiB", r.String())
	require.Equal(t, "3072 MiB used, no processes are running", (&reading{MemoryUsed: &used}).String())
	require.Empty(t, (&reading{Missing: "no library"}).String())
}
