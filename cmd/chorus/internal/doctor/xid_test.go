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

// The worst error of each GPU counts, not the last line, and the log says which errors are harmless.
func TestXidSeverity(t *testing.T) {
	const a, b = "NVRM: Xid (PCI:0000:06:00): ", "NVRM: Xid (PCI:0000:07:00): "
	for name, c := range map[string]struct {
		lines []string
		want  Verdict
		text  string
	}{
		"fatal SXid":              {[]string{"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"}, Fail, "SXid 20034 of NVSwitch 0000:c1:00.0"},
		"recovered":               {[]string{a + "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"}, Pass, "no error"},
		"reset required":          {[]string{a + "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"}, Fail, "Xid 154"},
		"nonfatal of NVLink":      {[]string{a + "145, RLW_REMAP Nonfatal", a + "149, NETIR_LINK_EVT Nonfatal"}, Warn, "Xid 149"},
		"off the bus, then 154":   {[]string{a + "79, GPU has fallen off the bus.", a + "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"}, Fail, "Xid 79"},
		"two GPUs":                {[]string{a + "79, GPU has fallen off the bus.", b + "48, pid=1, DBE"}, Fail, "Xid 79 of GPU 0000:06:00, 1m0s ago; Xid 48 of GPU 0000:07:00"},
		"nonfatal after fatal":    {[]string{a + "48, pid=1, DBE", a + "145, Nonfatal"}, Fail, "Xid 48"},
		"nonfatal of another GPU": {[]string{b + "145, Nonfatal", a + "48, pid=1, DBE"}, Fail, "Xid 48 of GPU 0000:06:00, 1m0s ago; Xid 145 of GPU 0000:07:00"},
	} {
		try(t, xid, change{name, func(w *world) {
			for _, l := range c.lines {
				w.log = append(w.log, KernelLine{time.Minute, l})
			}
		}, c.want, c.text})
	}
}
