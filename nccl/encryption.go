package nccl

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// An encryption is the state of NCCL's encryption in this process.
type encryption struct {
	mu      sync.Mutex
	key     []byte // nil until SetEncryption
	started bool   // NCCL may have opened connections
}

var encryptionKey kept.Key

// encryptionOf returns the state for the System of a device.
func encryptionOf(dev *device.Device) *encryption {
	return gpu.DeviceOf(dev).System().Local(&encryptionKey, func() any { return &encryption{} }).(*encryption)
}

// SetEncryption makes NCCL encrypt its connections over TCP with TLS 1.3 and authenticate the
// other ranks by a key (ncclSetEncryption). The key has at least 32 bytes, none of them 0. NCCL
// must be 2.32.3 or newer, and built with OpenSSL 3. All processes of the job must call it with the same key before
// they make the first id or communicator on the System of dev, and keep the key. A second call
// must have the same key. If CHORUS_NCCL_ENCRYPT is yes, comm.Join calls it with a key of the
// job.
//
// Only NCCL's own sockets are encrypted: its start-up and its socket transport. NVLink, shared
// memory, InfiniBand and network plugins are not. Chorus's tests have run this on virtual devices
// only, so look at the traffic before you rely on it.
func SetEncryption(dev *device.Device, key []byte) error {
	const f = ncclapi.FuncSetEncryption
	if dev == nil {
		return errors.New("nccl: set encryption: no device given")
	}
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return err
	}
	v, _ := api.GetVersion()
	if !api.Has(f) {
		return needs(f.Name(), f.Since(), v)
	}
	if len(key) < ncclapi.MinPSK || bytes.IndexByte(key, 0) >= 0 {
		return fmt.Errorf("nccl: %s: a key of %d bytes: want at least %d bytes, and none of them 0: %w", f.Name(), len(key), ncclapi.MinPSK, ErrorInvalidArgument)
	}
	e := encryptionOf(dev)
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.key != nil && bytes.Equal(e.key, key):
		return nil
	case e.key != nil:
		return fmt.Errorf("nccl: %s: this process already uses another key: use one key for the whole job: %w", f.Name(), ErrorInvalidUsage)
	case e.started:
		return fmt.Errorf("nccl: %s: this process has already made an id or a communicator: set the key before: %w", f.Name(), ErrorInvalidUsage)
	}
	cfg := ncclapi.NewEncryptionConfig(v, string(key))
	if err := call(dev, f.Name(), func(api ncclapi.API) ncclapi.Result { return api.SetEncryption(cfg) }); err != nil {
		return err
	}
	e.key = bytes.Clone(key)
	return nil
}

// startNetworking notes that NCCL opens connections. It returns an error if the environment asks
// for encryption and there is no key.
func startNetworking(dev *device.Device) error {
	e := encryptionOf(dev)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.key == nil {
		switch want, err := env.NCCLEncrypt.OneOf("yes", "no"); {
		case err != nil:
			return err
		case want == "yes":
			return fmt.Errorf("nccl: %s is yes, but there is no key: make the communicator by comm.Join in a job with a secret, or call nccl.SetEncryption before: %w",
				env.NCCLEncrypt.Name, ErrorInvalidUsage)
		}
	}
	e.started = true
	return nil
}

// explainEncryption adds the requirements of encryption to an error that NCCL returns without
// them.
func explainEncryption(dev *device.Device, err error) error {
	if !errors.Is(err, ErrorInvalidUsage) && !errors.Is(err, ErrorSystem) {
		return err
	}
	e := encryptionOf(dev)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.key == nil {
		return err
	}
	return fmt.Errorf("%w (encryption is on: NCCL must be built with TLS_BACKEND=OPENSSL3, and find libssl.so.3 and libcrypto.so.3)", err)
}
