package memory

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/internal/alloc"
	"github.com/gochorus/chorus/internal/env"
)

// environment has the options that the process was started with.
var environment = sync.OnceValues(func() (alloc.Settings, error) {
	v := env.AllocConf
	if !v.IsSet() {
		v = env.TorchAllocConf
	}
	s, err := alloc.ParseSettings(v.Value())
	if err != nil {
		return s, fmt.Errorf("memory: %s: %w", v.Name, err)
	}
	return s, nil
})
