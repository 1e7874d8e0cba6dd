package ncclapi

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

const hostIDName = "NCCL_HOSTID"

// HostID returns NCCL's name for the host of this process, or "" if NCCL chooses it:
// NCCL_HOSTID, or a name of this process alone if CHORUS_SHARE_GPUS is yes. NCCL refuses two
// ranks of one host on one GPU, and connects ranks of two hosts over the network.
func HostID() string {
	if id := os.Getenv(hostIDName); id != "" || !SharesGPUs() {
		return id
	}
	return ownHost()
}

// SharesGPUs reports whether CHORUS_SHARE_GPUS permits several processes on one GPU.
func SharesGPUs() bool { return env.ShareGPUs.Value() == "yes" }

var ownHost = sync.OnceValue(func() string {
	host, _ := os.Hostname() // the rest of the name is sufficient
	return fmt.Sprintf("chorus-%s-%d-%x", host, os.Getpid(), time.Now().UnixNano())
})

// libc has setenv: os.Setenv does not change the environment of C in a build without cgo.
var libc = &dl.Spec{Name: "the C library", Sonames: []string{"libc.so.6"}}

// setHostID makes NCCL read HostID. NCCL reads it once, when the first communicator is made.
func setHostID() error {
	if _, err := env.ShareGPUs.OneOf("yes", "no"); err != nil {
		return err
	}
	if !SharesGPUs() || os.Getenv(hostIDName) != "" {
		return nil
	}
	so, err := dl.Open(libc)
	if err != nil {
		return fmt.Errorf("nccl: set %s for %s: %w", hostIDName, env.ShareGPUs.Name, err)
	}
	setenv, ok := so.Symbol("setenv")
	if !ok {
		return fmt.Errorf("nccl: set %s for %s: %s has no setenv", hostIDName, env.ShareGPUs.Name, so.Path())
	}
	if dl.Get().String(hostIDName).String(HostID()).In(1).Do(setenv) != 0 {
		return errors.New("nccl: the C library could not set " + hostIDName)
	}
	return nil
}
