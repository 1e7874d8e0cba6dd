package fabric_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A hostSource is a CUDA source, compiled as a program of the host. A test writes random operands to in and the results of virtual
// devices to want, and compares them with what the program writes.
type hostSource struct {
	t        *testing.T
	rng      *rand.Rand
	ranks    int
	group    []member // of virtual devices
	in, want bytes.Buffer

	element, program string
}

// onHost calls one of the functions, at random: each type takes seconds to compile.
func onHost(t *testing.T, halfs func(*hostSource, float[memory.Float16Bits]), bfloats func(*hostSource, float[memory.BFloat16Bits]), singles func(*hostSource, float[float32])) {
	rng := seeded(t)
	h := &hostSource{t: t, rng: rng, ranks: 2 + rng.IntN(2)}
	switch rng.IntN(3) {
	case 0:
		h.element = "Half"
		halfs(h, half)
	case 1:
		h.element = "BFloat"
		bfloats(h, bfloat)
	default:
		h.element = "float"
		singles(h, single)
	}
}

// compile compiles the source for the type and the number of ranks, and opens the group.
func (h *hostSource) compile(source string, cfg *fabric.Config, flags ...string) {
	h.t.Helper()
	h.program = testgpu.BuildForHost(h.t, source, append(flags, "-pthread", "-w", "-DCHORUS_TYPE="+h.element, fmt.Sprint("-DCHORUS_RANKS=", h.ranks))...)
	h.group = open(h.t, testgpu.Virtual(h.t, &device.SystemConfig{VirtualDevices: h.ranks}), cfg)
}

// compare runs the program, compares its results, and empties both buffers. The text describes the operands.
func (h *hostSource) compare(format string, args ...any) {
	h.t.Helper()
	cmd := exec.CommandContext(testgpu.Context(h.t), h.program)
	cmd.Stdin = &h.in
	out, err := cmd.Output()
	require.NoError(h.t, err)
	require.True(h.t, bytes.Equal(h.want.Bytes(), out), "%d ranks, %s, %s: the bits of the source differ from the Go functions", h.ranks, h.element, fmt.Sprintf(format, args...))
	h.in.Reset()
	h.want.Reset()
}

func put(t *testing.T, to *bytes.Buffer, values ...any) {
	for _, v := range values {
		require.NoError(t, binary.Write(to, binary.LittleEndian, v))
	}
}
