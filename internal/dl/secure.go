package dl

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
)

// atSecure is the number of AT_SECURE in the vector that the kernel gives a process.
const atSecure = 23

// secure reports whether the process has rights that its starter does not, as a set-uid
// program. Then, as for the system's loader, nothing in the environment chooses a library.
var secure = sync.OnceValue(func() bool {
	vector, err := os.ReadFile("/proc/self/auxv")
	if err != nil {
		return os.Getuid() != os.Geteuid() || os.Getgid() != os.Getegid()
	}
	return isSecure(vector)
})

// isSecure reads the vector: pairs of a number and a value, of eight bytes each.
func isSecure(vector []byte) bool {
	for ; len(vector) >= 16; vector = vector[16:] {
		if binary.NativeEndian.Uint64(vector) == atSecure {
			return binary.NativeEndian.Uint64(vector[8:]) != 0
		}
	}
	return false
}

// secureHost is the computer as a process sees it that must not trust its environment.
func secureHost() *machine {
	return &machine{
		getenv:   func(string) string { return "" },
		lookPath: func(string) (string, error) { return "", errors.New("the process must not trust PATH") },
		secure:   true,
	}
}
