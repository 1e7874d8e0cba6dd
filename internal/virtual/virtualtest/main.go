package virtualtest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Main runs the tests of a package, checks that none left a goroutine behind, and exits.
func Main(m *testing.M) {
	if os.Getenv("GORACE") == "" {
		os.Setenv("GORACE", "atexit_sleep_ms=0") // see testgpu.Main
	}
	code := m.Run()
	if left := strayGoroutines(); code == 0 && left != "" {
		fmt.Fprintln(os.Stderr, "goroutines were left behind:\n"+left)
		code = 99
	}
	os.Exit(code)
}

// strayGoroutines returns the stacks of the virtual devices' goroutines that do not
// end. Tests that make a stream hang forever leave one each.
func strayGoroutines() string {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		buf := make([]byte, 1<<20)
		stacks := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
		var left []string
		for _, s := range stacks[1:] {
			if strings.Contains(s, "internal/virtual/") && !strings.Contains(s, "fault.Forever") {
				left = append(left, s)
			}
		}
		if len(left) == 0 {
			return ""
		}
		if time.Now().After(deadline) {
			return strings.Join(left, "\n\n")
		}
	}
}
