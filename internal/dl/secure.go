package dl

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
)

// atSecure is the key of AT_SECURE in the auxiliary vector of a process.
const atSecure = 23

// secure reports whether the process has more privileges than its starter, as a set-uid
// program. Then, as in the system's loader, the environment cannot choose a library.
var secure = sync.OnceValue(func() bool {
	vector, err := os.ReadFile("/proc/self/auxv")
	if err != nil {
		return os.Getuid() != os.Geteuid() || os.Getgid() != os.Getegid()
	}
	return isSecure(vector)
})

// isSecure parses the vector: pairs of a key and a value, of eight bytes each.
func isSecure(vector []byte) bool {
	for ; len(vector) >= 16; vector = vector[16:] {
		if binary.NativeEndian.Uint64(vector) == atSecure {
			return binary.NativeEndian.Uint64(vector[8:]) != 0
		}
	}
	return false
}

// secureHost is the machine of a process that must not trust its environment.
func secureHost() *machine {
	return &machine{
		getenv:   func(string) string { return "" },
		lookPath: func(string) (string, error) { return "", errors.New("the process must not trust PATH") },
		secure:   true,
	}
}
