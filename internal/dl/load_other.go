//go:build !linux

package dl

func load(string) (handle uintptr, reason string) {
	return 0, "NVIDIA's libraries are opened on Linux only"
}

func symbol(uintptr, string) (uintptr, bool) { return 0, false }

func loadedFrom(uintptr) string { return "" }

func errnoLocation() uintptr { return 0 }
