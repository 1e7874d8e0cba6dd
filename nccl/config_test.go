package nccl_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
)

var psk = []byte("0123456789abcdef0123456789abcdef")

func TestSetEncryption(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	short := nccl.SetEncryption(devs[0], psk[1:])
	require.ErrorIs(t, short, nccl.ErrorInvalidArgument)
	require.ErrorContains(t, short, "a key of 31 bytes: want at least 32")
	require.ErrorIs(t, nccl.SetEncryption(devs[0], append([]byte{0}, psk...)), nccl.ErrorInvalidArgument)
	require.ErrorContains(t, nccl.SetEncryption(nil, psk), "no device given")

	require.NoError(t, nccl.SetEncryption(devs[0], psk))
	total(t, connect(t, devs))
	require.NoError(t, nccl.SetEncryption(devs[1], psk), "the same key")
	other := nccl.SetEncryption(devs[0], append(psk[:31:31], 'x'))
	require.ErrorIs(t, other, nccl.ErrorInvalidUsage)
	require.ErrorContains(t, other, "already uses another key")
}

func TestSetEncryptionTooLate(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest})
	_, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	late := nccl.SetEncryption(devs[0], psk)
	require.ErrorIs(t, late, nccl.ErrorInvalidUsage)
	require.ErrorContains(t, late, "has already made an id or a communicator")
}

func TestEncryptionThatIsMissing(t *testing.T) {
	old := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: "2.31.2"})[0]
	var u *device.UnsupportedError
	require.ErrorAs(t, nccl.SetEncryption(old, psk), &u)
	require.Equal(t, "NCCL 2.32.3", u.Need)

	// A NCCL that was built without OpenSSL takes the key, and fails when it connects.
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest,
		Faults: "ncclGetUniqueId#1=ncclInvalidUsage,ncclCommInitRankScalable#1=ncclInvalidUsage"})[0]
	require.NoError(t, nccl.SetEncryption(dev, psk))
	_, err := nccl.NewUniqueID(dev)
	require.ErrorContains(t, err, "encryption is on: NCCL must be built with TLS_BACKEND=OPENSSL3")
	id, err := nccl.NewUniqueID(dev)
	require.NoError(t, err)
	_, err = nccl.NewCommunicator(testgpu.Context(t), dev, id, 0, 1, nil)
	require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
	require.ErrorContains(t, err, "encryption is on")
}

// If encryption is asked for, no communicator is made without it.
func TestEncryptionOfTheEnvironment(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	id, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	t.Setenv("CHORUS_NCCL_ENCRYPT", "yes")
	_, err = nccl.NewUniqueID(devs[0])
	require.ErrorContains(t, err, "CHORUS_NCCL_ENCRYPT is yes, but there is no key")
	_, err = nccl.NewCommunicator(testgpu.Context(t), devs[0], id, 0, 1, nil)
	require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
	t.Setenv("CHORUS_NCCL_ENCRYPT", "maybe")
	_, err = nccl.NewUniqueID(devs[0])
	require.ErrorContains(t, err, "want one of yes, no")
	t.Setenv("CHORUS_NCCL_ENCRYPT", "yes")
	fresh := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	require.NoError(t, nccl.SetEncryption(fresh[0], psk))
	total(t, connect(t, fresh))
}

// Virtual devices do not pretend to encrypt their connections over TCP.
func TestEncryptionOverTCP(t *testing.T) {
	t.Setenv("CHORUS_VIRTUAL_NETWORK", "127.0.0.1")
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest})[0]
	err := nccl.SetEncryption(dev, psk)
	require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
	require.ErrorContains(t, err, "virtual devices do not encrypt their connections over TCP")
}
