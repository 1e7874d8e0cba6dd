package dl

import (
	"runtime"
	"sync"

	"github.com/ebitengine/purego"
)

// load opens a shared library and returns its handle, or 0 and the reason.
func load(path string) (handle uintptr, reason string) {
	// The last error message belongs to the OS thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return 0, err.Error()
	}
	return handle, ""
}

func symbol(handle uintptr, name string) (uintptr, bool) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := purego.Dlsym(handle, name)
	return p, err == nil
}

// linkMap is the head of struct link_map in link.h.
type linkMap struct {
	_    uintptr // l_addr
	name uintptr // l_name
}

var dlinfo = sync.OnceValue(func() uintptr {
	p, _ := symbol(purego.RTLD_DEFAULT, "dlinfo")
	return p
})

// errnoLocation is the function of the C library that the macro errno calls.
var errnoLocation = sync.OnceValue(func() uintptr {
	p, _ := symbol(purego.RTLD_DEFAULT, "__errno_location")
	return p
})

// loadedFrom returns the path under which the loader found the library.
func loadedFrom(handle uintptr) string {
	const linkmapRequest = 2 // RTLD_DI_LINKMAP
	fn := dlinfo()
	if fn == 0 {
		return ""
	}
	lm, r := Get().In(handle, linkmapRequest).Out().Do1(fn)
	if r != 0 || lm == 0 {
		return ""
	}
	return GoString((*linkMap)(Pointer(lm)).name)
}
