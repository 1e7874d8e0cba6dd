package doctor

import (
	"fmt"
	"io/fs"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestXid(t *testing.T) {
	try(t, xid,
		noGPU,
		change{"no permission", func(w *world) { w.KernelLog = func() ([]KernelLine, error) { return nil, fs.ErrPermission } }, Unknown, "CAP_SYSLOG"},
		change{"fell off the bus", logged(79, 12*time.Minute), Fail, "Xid 79 of GPU 0000:06:00, 12m0s ago"},
		change{"NVLink", logged(145, time.Minute), Fail, "an NVLink had an error"},
		change{"old", logged(48, 3*time.Hour), Warn, "3h0m0s ago"},
		change{"a fault of a program", logged(13, time.Minute), Pass, "no error"},
		change{"another message", func(w *world) { w.log = []KernelLine{{0, "NVRM: loading"}} }, Pass, "no error"},
	)
}

// logged makes a host whose driver reported an error.
func logged(number int, age time.Duration) func(w *world) {
	return func(w *world) {
		w.log = []KernelLine{{age + time.Hour, "usb 1-1: new device"}, {age, fmt.Sprintf("NVRM: Xid (PCI:0000:06:00): %d, pid=1, text", number)}}
	}
}

func TestKernelLine(t *testing.T) {
	l, ok := kernelLine("4,1234,5000000,-;NVRM: Xid\n SUBSYSTEM=pci\n", 7*time.Second)
	require.True(t, ok)
	require.Equal(t, KernelLine{2 * time.Second, "NVRM: Xid"}, l)
	for _, text := range []string{"", ";", "4,5;x", "4,5,x;y", "no semicolon"} {
		_, ok := kernelLine(text, 0)
		require.False(t, ok, text)
	}
}
