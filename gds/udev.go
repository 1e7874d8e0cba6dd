package gds

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cufileapi"
)

// udevFolder is the directory of udev's device database.
var udevFolder = "/run/udev/data"

// unregistered returns the error of a file that cuFile did not register. cuFile asks udev
// for the file system on the file's disk. Without udev, as in most containers and small
// virtual machines, cuFile only reports that it did not register the file.
func unregistered(r cufileapi.Result, fd int) error {
	err := failed("cuFileHandleRegister", r)
	var st unix.Stat_t
	if r != cufileapi.HandleNotRegistered || unix.Fstat(fd, &st) != nil {
		return err
	}
	if why := unknownDisk(st.Dev); why != "" {
		return fmt.Errorf("%w; %s", err, why)
	}
	return err
}

// unknownDisk explains why udev does not know the disk with that number, or returns "".
func unknownDisk(number uint64) string {
	major, minor := unix.Major(number), unix.Minor(number)
	if major == 0 {
		return "the file is on no disk that udev could know, and this cuFile takes no others"
	}
	entry := fmt.Sprintf("%s/b%d:%d", udevFolder, major, minor)
	if _, err := os.Stat(entry); err == nil {
		return ""
	}
	return fmt.Sprintf("cuFile asks udev for the disk, and there is no %s: in a container, mount the host's /run/udev", entry)
}
